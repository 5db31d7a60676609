"""S4, S7, S10: the orderings that the pipeline promises, on streams that really run late.

Each test has a twin that takes away just that ordering, and then must see wrong bytes: so the test
would go red. Two gloo ranks; rank 0 keeps layers 0..3, rank 1 layers 4..7; slot = layer % 2.
Field report 5.3: use before ready.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext

import pytest

from kvpp_core.device.base import Device, Fence
from kvpp_core.device.cpu import CpuDevice, CpuStream
from kvpp_core.errors import LoadFailed
from kvpp_core.policy import BroadcastPolicy
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rig import (
    ACTIVE,
    CONTROLLED,
    DEVICES,
    PATIENCE,
    ControlledKind,
    DeviceKind,
    controlled,
    rig,
)
from tests.core.simulated_device import StreamName

POLICIES = (BroadcastPolicy.FULL, BroadcastPolicy.RUNS, BroadcastPolicy.PACKED)


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


def late_owner_write(
    rank: Rank, kind: ControlledKind, policy: BroadcastPolicy, broken: bool
) -> list[str]:
    """Rank 0's write of layer 0 is submitted before the step, and happens late."""
    device = controlled(kind, break_wait_compute=broken and rank.rank == 0)
    with rig(rank, device, policy=policy) as r:
        late = device.hold("compute", "writing layer 0") if rank.rank == 0 else None
        if late is not None:
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


def late_transfer(
    rank: Rank, kind: ControlledKind, policy: BroadcastPolicy, broken: bool
) -> list[str]:
    """Rank 1 receives layer 0 so late that its read has been submitted."""
    device = controlled(kind, break_wait_transfer=broken and rank.rank == 1)
    with rig(rank, device, policy=policy) as r:
        late = device.hold("transfer", "broadcast of layer 0") if rank.rank == 1 else None
        r.pipeline.begin(ACTIVE)
        r.acquire(0)
        r.read(0, generation=1)
        if late is not None:
            device.settle()
            late.open()
        r.forward(1, 1)
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


def late_load(rank: Rank, kind: DeviceKind, layer: int) -> list[str]:
    """The owner's load of ``layer`` ends only when the transfer has gone as far as it can."""
    with rig(rank, kind) as r:
        fence: Future[None] = Future()
        owned = r.owns(layer)

        def load() -> None:
            r.settle()
            r.load(layer, 2, fence)

        with r.when_the_host_waits(load) if owned else nullcontext(load) as load_now:
            r.pipeline.begin(ACTIVE, {layer: fence} if owned else None, guarded=True)
            r.forward(1, 0, layer)
            if owned:
                load_now()
            r.acquire(layer)
        r.read(layer, generation=2)
        r.forward(1, layer + 1)
        r.pipeline.end()
        return r.complaints()


class _NoFences(CpuStream):
    """A CPU transfer stream without the ordering under test."""

    def wait_fence(self, fence: Fence, timeout: float, what: str) -> None:
        """Do not wait."""


def unfenced_load(rank: Rank, kind: DeviceKind, layer: int) -> list[str]:
    """`late_load`, with transfers that do not wait for fences.

    The pipeline notices that it has sent a layer before its load: LoadFailed, its second line of
    defence. What the receivers hold then is the bytes before the load.
    """
    device: Device
    if kind == "cpu":
        device = CpuDevice(PATIENCE)
        device.transfer = _NoFences()
    else:
        device = controlled(kind, break_fence=True)
    with rig(rank, device) as r:
        fence: Future[None] = Future()
        owned = r.owns(layer)
        r.pipeline.begin(ACTIVE, {layer: fence} if owned else None, guarded=True)
        r.forward(1, 0, layer)
        if owned:
            r.settle()
            r.load(layer, 2, fence)
        with pytest.raises(LoadFailed):
            r.acquire(layer)
        r.pipeline.abort()
        r.read(layer, generation=2)
        return r.complaints()


def all_layers_loaded(rank: Rank, kind: DeviceKind) -> list[str]:
    """One loader thread per rank loads the rank's layers one by one during the step."""
    with rig(rank, kind) as r:
        fences: dict[int, Future[None]] = {layer: Future() for layer in range(8) if r.owns(layer)}

        def load_all() -> None:
            for layer, fence in fences.items():
                r.load(layer, 2, fence)

        with r.background(load_all):
            r.step(2, fences, guarded=True)
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


def _assert_right(results: list[list[str]]) -> None:
    assert results == [[], []]


def _assert_wrong(results: list[list[str]], expected: str) -> None:
    """Some rank read wrong bytes of the layer that the test is about."""
    assert any(expected in complaint for found in results for complaint in found), results


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", CONTROLLED)
def test_a_slot_is_not_refilled_before_its_late_reader_is_done(
    world2: GlooWorld, kind: ControlledKind, policy: BroadcastPolicy
) -> None:
    _assert_right(world2.run(slot_reuse, kind, policy, broken=False))


@pytest.mark.parametrize("kind", CONTROLLED)
def test_twin_without_waiting_for_compute_a_late_reader_sees_the_next_layer(
    world2: GlooWorld, kind: ControlledKind
) -> None:
    _assert_wrong(world2.run(slot_reuse, kind, BroadcastPolicy.FULL, broken=True), "layers.0.")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", CONTROLLED)
def test_a_broadcast_covers_the_owners_earlier_late_write(
    world2: GlooWorld, kind: ControlledKind, policy: BroadcastPolicy
) -> None:
    _assert_right(world2.run(late_owner_write, kind, policy, broken=False))


@pytest.mark.parametrize("kind", CONTROLLED)
def test_twin_without_waiting_for_compute_a_broadcast_misses_the_owners_write(
    world2: GlooWorld, kind: ControlledKind
) -> None:
    _assert_wrong(
        world2.run(late_owner_write, kind, BroadcastPolicy.FULL, broken=True), "layers.0."
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", CONTROLLED)
def test_a_layer_is_not_read_before_its_late_broadcast_has_ended(
    world2: GlooWorld, kind: ControlledKind, policy: BroadcastPolicy
) -> None:
    _assert_right(world2.run(late_transfer, kind, policy, broken=False))


@pytest.mark.parametrize("kind", CONTROLLED)
def test_twin_without_waiting_for_the_transfer_a_layer_is_read_too_early(
    world2: GlooWorld, kind: ControlledKind
) -> None:
    _assert_wrong(world2.run(late_transfer, kind, BroadcastPolicy.FULL, broken=True), "layers.0.")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", CONTROLLED)
def test_the_owner_does_not_overwrite_a_layer_before_its_broadcast_has_ended(
    world2: GlooWorld, kind: ControlledKind, policy: BroadcastPolicy
) -> None:
    _assert_right(world2.run(owner_overwrites, kind, policy, broken=False))


@pytest.mark.parametrize("kind", CONTROLLED)
def test_twin_without_waiting_for_the_transfer_the_owner_overwrites_what_is_being_sent(
    world2: GlooWorld, kind: ControlledKind
) -> None:
    _assert_wrong(
        world2.run(owner_overwrites, kind, BroadcastPolicy.FULL, broken=True), "layers.0."
    )


@pytest.mark.parametrize("layer", [0, 2, 5])
@pytest.mark.parametrize("kind", DEVICES)
def test_a_layer_is_broadcast_after_its_late_load(
    world2: GlooWorld, kind: DeviceKind, layer: int
) -> None:
    _assert_right(world2.run(late_load, kind, layer))


@pytest.mark.parametrize("kind", DEVICES)
def test_twin_without_waiting_for_the_fence_receivers_get_the_bytes_before_the_load(
    world2: GlooWorld, kind: DeviceKind
) -> None:
    _assert_wrong(world2.run(unfenced_load, kind, 2), "layers.2.")


@pytest.mark.parametrize("kind", DEVICES)
def test_one_thread_may_load_all_layers_while_the_forward_waits_for_them(
    world2: GlooWorld, kind: DeviceKind
) -> None:
    _assert_right(world2.run(all_layers_loaded, kind))


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
    _assert_right(world2.run(starved, kind, streams))
