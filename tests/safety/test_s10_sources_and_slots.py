"""S10: a source is not overwritten before receivers are done; a slot not before its reader.

Two gloo ranks over streams that really run late; rank 0 keeps layers 0..3, rank 1 layers 4..7; slot
= layer % 2. Each test has a twin that takes away just that ordering and must see wrong bytes.
Injected: a late reader, a late transfer. Field report 5.3.
"""

from __future__ import annotations

import pytest

from kvpp_core.policy import BroadcastPolicy
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rig import (
    ACTIVE,
    CONTROLLED,
    MODES,
    ControlledKind,
    assert_right,
    assert_wrong,
    controlled,
    rig,
)


def slot_reuse(
    rank: Rank, kind: ControlledKind, policy: BroadcastPolicy, broken: bool
) -> list[str]:
    """Rank 1 reads layer 0 so late that layer 2, for the same slot, has been started."""
    device = controlled(kind, break_wait_compute=broken and rank.rank == 1)
    with rig(rank, device, policy=policy) as r:
        late = device.hold("compute", "reading layer 0") if rank.rank == 1 else None
        r.pipeline.begin(ACTIVE)
        r.forward(1, 0, 2)  # acquiring layer 1 starts layer 2
        if late is not None:
            device.settle()
            late.open()
        r.forward(1, 2)
        r.pipeline.end()
        return r.complaints()


def owner_overwrites(
    rank: Rank, kind: ControlledKind, policy: BroadcastPolicy, broken: bool
) -> list[str]:
    """Rank 0 writes layer 0 right after it acquired it, while its own sending is late."""
    device = controlled(kind, break_wait_transfer=broken and rank.rank == 0)
    with rig(rank, device, policy=policy) as r:
        late = device.hold("transfer", "broadcast of layer 0") if rank.rank == 0 else None
        r.pipeline.begin(ACTIVE)
        r.acquire(0)
        if late is not None:
            r.write(0, generation=2)
            device.settle()
            late.open()
        else:
            r.read(0, generation=1)
        r.forward(1, 1)
        r.pipeline.end()
        return r.complaints()


@pytest.mark.parametrize("policy", MODES)
@pytest.mark.parametrize("kind", CONTROLLED)
def test_a_slot_is_not_refilled_before_its_late_reader_is_done(
    world2: GlooWorld, kind: ControlledKind, policy: BroadcastPolicy
) -> None:
    assert_right(world2.run(slot_reuse, kind, policy, broken=False))


@pytest.mark.parametrize("kind", CONTROLLED)
def test_twin_without_waiting_for_compute_a_late_reader_sees_the_next_layer(
    world2: GlooWorld, kind: ControlledKind
) -> None:
    assert_wrong(world2.run(slot_reuse, kind, BroadcastPolicy.FULL, broken=True), "layers.0.")


@pytest.mark.parametrize("policy", MODES)
@pytest.mark.parametrize("kind", CONTROLLED)
def test_the_owner_does_not_overwrite_a_layer_before_its_broadcast_has_ended(
    world2: GlooWorld, kind: ControlledKind, policy: BroadcastPolicy
) -> None:
    assert_right(world2.run(owner_overwrites, kind, policy, broken=False))


@pytest.mark.parametrize("kind", CONTROLLED)
def test_twin_without_waiting_for_the_transfer_the_owner_overwrites_what_is_being_sent(
    world2: GlooWorld, kind: ControlledKind
) -> None:
    assert_wrong(world2.run(owner_overwrites, kind, BroadcastPolicy.FULL, broken=True), "layers.0.")
