"""S7: restore, zeroing and other writes are ordered with a broadcast, both ways.

What an owner wrote before a step is in the step's broadcast, however late it happens; what it
writes after the step is not. Two gloo ranks over streams that really run late; rank 0 keeps layers
0..3, rank 1 layers 4..7. Each ordering has a twin that takes it away and must see wrong bytes.
Injected: late zeroing and writing, a late transfer, streams that run as late as they can. Field
reports 5.3 and 2.5.
"""

from __future__ import annotations

from typing import Literal, get_args

import pytest

from kvpp_core.policy import BroadcastPolicy
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rig import (
    ACTIVE,
    CONTROLLED,
    MODES,
    ControlledKind,
    Rig,
    assert_right,
    assert_wrong,
    controlled,
    rig,
)
from tests.core.simulated_device import StreamName

Earlier = Literal["written", "zeroed, then restored"]


def zero(r: Rig, ordinal: int) -> None:
    """As the engine prepares blocks."""
    for component in r.memory.placement.bundles[ordinal].components:
        r.memory.rows(component).zero_()


def late_owner_write(
    rank: Rank, kind: ControlledKind, policy: BroadcastPolicy, what: Earlier, broken: bool
) -> list[str]:
    """What rank 0 does to layer 0 is submitted before the step, and happens late."""
    device = controlled(kind, break_wait_compute=broken and rank.rank == 0)
    with rig(rank, device, policy=policy) as r:
        late = device.hold("compute", "writing layer 0") if rank.rank == 0 else None
        if late is not None:
            if what == "zeroed, then restored":
                device.compute.run(lambda: zero(r, 0), "writing layer 0: zeroes")
            r.write(0, generation=2)
        r.pipeline.begin(ACTIVE)
        if late is not None:
            device.settle()
            late.open()
        r.acquire(0)
        r.read(0, generation=2)
        r.forward(1, 1)
        r.pipeline.end()
        return r.complaints()


def early_next_write(
    rank: Rank, kind: ControlledKind, policy: BroadcastPolicy, broken: bool
) -> list[str]:
    """Rank 1 sends its layer 7 late, and writes it for the next step as soon as this one ended."""
    device = controlled(kind, break_wait_transfer=broken and rank.rank == 1)
    with rig(rank, device, policy=policy) as r:
        late = device.hold("transfer", "broadcast of layer 7") if rank.rank == 1 else None
        r.pipeline.begin(ACTIVE)
        r.forward(1, 0, 7)
        r.acquire(7)
        if late is None:
            r.read(7, generation=1)
        r.pipeline.end()
        if late is not None:
            r.write(7, generation=2)
            device.settle()
            late.open()
        r.pipeline.begin(ACTIVE)
        r.forward(1, 0, 7)
        r.acquire(7)
        r.read(7, generation=2)
        r.pipeline.end()
        return r.complaints()


def starved(
    rank: Rank, kind: ControlledKind, streams: tuple[StreamName | None, StreamName | None]
) -> list[str]:
    """Steps with loads, late writes and history in which a rank's stream runs as late as it can."""
    device = controlled(kind, starved=streams[rank.rank])
    found: list[str] = []
    with rig(rank, device) as r:
        for generation in range(2, 6):
            r.pipeline.begin(())  # a step without history writes what the next one reads
            for layer in r.memory.placement.owned:
                r.acquire(layer)
                r.write(layer, generation)
            r.pipeline.end()
            r.step(generation)
        found += r.complaints()
    return found


@pytest.mark.parametrize("what", get_args(Earlier))
@pytest.mark.parametrize("policy", MODES)
@pytest.mark.parametrize("kind", CONTROLLED)
def test_a_broadcast_covers_the_owners_earlier_late_write(
    world2: GlooWorld, kind: ControlledKind, policy: BroadcastPolicy, what: Earlier
) -> None:
    assert_right(world2.run(late_owner_write, kind, policy, what, broken=False))


@pytest.mark.parametrize("what", get_args(Earlier))
@pytest.mark.parametrize("kind", CONTROLLED)
def test_twin_without_waiting_for_compute_a_broadcast_misses_the_owners_write(
    world2: GlooWorld, kind: ControlledKind, what: Earlier
) -> None:
    results = world2.run(late_owner_write, kind, BroadcastPolicy.FULL, what, broken=True)
    assert_wrong(results, "layers.0.")


@pytest.mark.parametrize("policy", MODES)
@pytest.mark.parametrize("kind", CONTROLLED)
def test_a_broadcast_has_nothing_of_what_is_written_after_its_step(
    world2: GlooWorld, kind: ControlledKind, policy: BroadcastPolicy
) -> None:
    assert_right(world2.run(early_next_write, kind, policy, broken=False))


@pytest.mark.parametrize("kind", CONTROLLED)
def test_twin_without_waiting_for_the_transfer_the_next_steps_write_is_sent(
    world2: GlooWorld, kind: ControlledKind
) -> None:
    results = world2.run(early_next_write, kind, BroadcastPolicy.FULL, broken=True)
    assert_wrong(results, "layers.7.")


@pytest.mark.parametrize("kind", CONTROLLED)
@pytest.mark.parametrize(
    "streams",
    [
        ("compute", "compute"),
        ("transfer", "transfer"),
        ("compute", "transfer"),
        ("transfer", "compute"),
        (None, "compute"),
        ("transfer", None),
    ],
)
def test_bytes_are_right_whichever_stream_runs_as_late_as_it_can(
    world2: GlooWorld,
    kind: ControlledKind,
    streams: tuple[StreamName | None, StreamName | None],
) -> None:
    assert_right(world2.run(starved, kind, streams))
