"""One rank's pipeline with everything around it, as the scenarios of the tests drive it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal, NamedTuple, Unpack

import torch
import torch.distributed as dist

from kvpp_core.bundles import largest_bytes_per_block
from kvpp_core.device.base import Device, Fence, Work
from kvpp_core.device.cpu import CpuDevice
from kvpp_core.group import KvppGroup, make_group
from kvpp_core.pipeline import Pipeline, PipelineSettings
from kvpp_core.policy import BroadcastPolicy, CostModel
from tests.core.gloo_world import Rank
from tests.core.rank_memory import UNALIGNED, Model, RankMemory, uneven_model
from tests.core.simulated_device import Breaks, SimulatedDevice
from tests.core.simulated_npu import SimulatedNpu, npu_is_there

__all__ = [
    "ACTIVE",
    "CONTROLLED",
    "DEVICES",
    "GLOO",
    "MODES",
    "NUM_BLOCKS",
    "PATIENCE",
    "QUEUING",
    "ControlledKind",
    "DeviceKind",
    "RecordingGroup",
    "Rig",
    "abandon",
    "assert_right",
    "assert_wrong",
    "controlled",
    "make_rig",
    "rig",
]

# Two ranks on two cores over loopback.
GLOO = CostModel(latency=0.44e-3, per_range=0.18e-3, bandwidth=2.8e9, pack_bandwidth=4.4e9)
PATIENCE = 30.0  # seconds, the bound of every wait that is expected to end
NUM_BLOCKS = 6
ACTIVE = (0, 1, 4)  # a run of two and a single block

ControlledKind = Literal["simulated", "npu"]
DeviceKind = Literal["cpu", "simulated", "npu"]
CONTROLLED: tuple[ControlledKind, ...] = ("simulated", "npu") if npu_is_there() else ("simulated",)
DEVICES: tuple[DeviceKind, ...] = ("cpu", *CONTROLLED)
# Where the host goes on while a transfer waits for a load, so that one thread can do both.
QUEUING: tuple[DeviceKind, ...] = ("cpu", "simulated")
# Policies that move every active byte in one way each.
MODES = (BroadcastPolicy.FULL, BroadcastPolicy.RUNS, BroadcastPolicy.PACKED)

_ABANDONED: list[Rig] = []


class RecordingGroup(KvppGroup):
    """A KvppGroup that keeps every broadcast it has started on the data group."""

    sent: list[tuple[int, Work]]  # bytes, and the collective

    def __init__(self, group: KvppGroup) -> None:
        super().__init__(group.ranks, group.rank, group.data, group.control)
        object.__setattr__(self, "sent", [])

    def broadcast(self, tensor: torch.Tensor, owner: int) -> dist.Work:
        """Start the broadcast and note it down."""
        work = super().broadcast(tensor, owner)
        self.sent.append((tensor.numel() * tensor.element_size(), work))
        return work

    @property
    def sent_bytes(self) -> int:
        """Bytes of all broadcasts so far."""
        return sum(size for size, _ in self.sent)

    @property
    def in_flight(self) -> int:
        """Broadcasts that have been started and not ended."""
        return sum(not work.is_completed() for _, work in self.sent)


class _Read(NamedTuple):
    ordinal: int
    generation: int
    blocks: Sequence[int]
    rows: list[torch.Tensor]


class Rig:
    """A pipeline, its memory, and a checker of what layers read."""

    def __init__(
        self,
        memory: RankMemory,
        group: RecordingGroup,
        device: Device,
        settings: PipelineSettings,
        staging_blocks: float,
    ) -> None:
        self.memory = memory
        self.group = group
        self.device = device
        self.settings = settings
        self.staging_bytes = int(staging_blocks * largest_bytes_per_block(memory.placement.bundles))
        staging = torch.zeros(self.staging_bytes, dtype=torch.uint8).to(memory.buffer.device)
        self.pipeline = Pipeline(memory.layout, memory.buffer, staging, group, device, settings)
        self._reads: list[_Read] = []

    @property
    def layers(self) -> int:
        """Number of target layers."""
        return len(self.memory.placement.bundles)

    def owns(self, ordinal: int) -> bool:
        """Whether this rank keeps a target layer."""
        return self.memory.placement.owners[ordinal] == self.memory.placement.rank

    def component(self, ordinal: int, index: int = 0) -> str:
        """Name of a component of a target layer."""
        return self.memory.placement.bundles[ordinal].components[index].name

    def acquire(self, ordinal: int) -> None:
        """Acquire a target layer by its last component: an indexer comes before its main cache."""
        self.pipeline.acquire(self.component(ordinal, -1))

    def set_policy(self, policy: BroadcastPolicy) -> None:
        """Change the broadcast policy between two steps."""
        self.pipeline.set_policy(policy)
        self.settings = replace(self.settings, policy=policy)

    def read(self, ordinal: int, generation: int, blocks: Sequence[int] = ACTIVE) -> None:
        """Submit a read of a layer to the compute stream; `complaints` checks what it has read."""

        def op() -> None:
            read = self.memory.read(ordinal, blocks)
            self._reads.append(_Read(ordinal, generation, blocks, read))

        self.device.compute.run(op, f"reading layer {ordinal}")

    def write(self, ordinal: int, generation: int, blocks: Sequence[int] = ACTIVE) -> None:
        """Submit a write of an own layer to the compute stream."""
        self.device.compute.run(
            lambda: self.memory.store(ordinal, generation, blocks), f"writing layer {ordinal}"
        )

    def forward(self, generation: int, first: int = 0, last: int | None = None) -> None:
        """Acquire and read the target layers from ``first`` to before ``last``."""
        for ordinal in range(first, self.layers if last is None else last):
            self.acquire(ordinal)
            self.read(ordinal, generation)

    def step(
        self,
        generation: int,
        fences: Mapping[int, Fence] | None = None,
        *,
        guarded: bool = False,
    ) -> None:
        """A whole step in which every layer must read the bytes of ``generation``."""
        self.pipeline.begin(ACTIVE, fences, guarded=guarded)
        self.forward(generation)
        self.pipeline.end()

    def complaints(self) -> list[str]:
        """Wait for the compute stream; what its reads found wrong so far."""
        self.device.compute.record().wait(PATIENCE)
        reads, self._reads = self._reads, []
        return [
            complaint
            for ordinal, generation, blocks, read in reads
            for complaint in self.memory.wrong(ordinal, blocks, generation, read)
        ]

    def load(self, ordinal: int, generation: int, fence: Future[None]) -> None:
        """What a KV connector does: write a layer's active blocks, then complete the fence."""
        place = self.memory.buffer.device
        if place.type == "cpu":
            self.memory.store(ordinal, generation, ACTIVE)
        else:
            stream = torch.Stream(place)
            with stream:
                self.memory.store(ordinal, generation, ACTIVE)
            stream.synchronize()
        fence.set_result(None)

    @contextlib.contextmanager
    def background(self, op: Callable[[], object]) -> Iterator[None]:
        """Run ``op`` in another thread beside the body; raise what it raised."""
        result: Future[object] = Future()

        def run() -> None:
            try:
                result.set_result(op())
            except BaseException as error:  # noqa: BLE001 - raised below
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        yield
        result.result(PATIENCE)

    @contextlib.contextmanager
    def when_the_host_waits(self, load: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Have ``load`` done once the pipeline waits for a fence; give what the body calls for it.

        An accelerator's pipeline blocks the host in a fence, so another thread must do it, and the
        body nothing. Elsewhere the body goes on, and does it itself.
        """
        device = self.device
        if not isinstance(device, SimulatedNpu):
            yield load
            return

        def wait_and_load() -> None:
            assert device.fence_reached.wait(PATIENCE)
            load()

        with self.background(wait_and_load):
            yield lambda: None

    def settle(self) -> None:
        """Let everything go as far as it can by itself. On the CPU nothing moves by itself."""
        if isinstance(self.device, (SimulatedDevice, SimulatedNpu)):
            self.device.settle()

    def close(self) -> None:
        """Close pipeline, group and device."""
        self.pipeline.close()
        self.group.close()
        if isinstance(self.device, (SimulatedDevice, SimulatedNpu)):
            self.device.close()


def controlled(kind: ControlledKind, **breaks: Unpack[Breaks]) -> SimulatedDevice | SimulatedNpu:
    """A device whose streams can be held, starved, and rid of single orderings."""
    return SimulatedDevice(**breaks) if kind == "simulated" else SimulatedNpu(PATIENCE, **breaks)


def make_rig(
    rank: Rank,
    device: Device | DeviceKind,
    *,
    model: Model | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    policy: BroadcastPolicy = BroadcastPolicy.AUTO,
    staging_blocks: float = 2.5,
    num_blocks: int = NUM_BLOCKS,
    timeout: float = PATIENCE,
    load_timeout: float = PATIENCE,
    poison_scratch: bool = False,
    guard: int = UNALIGNED,
) -> Rig:
    """Build a rig. Collective over the world.

    Without ``model`` 8 uneven layers, without ``groups`` one group of all ranks. ``staging_blocks``
    is the staging memory in blocks of the largest bundle.
    """
    groups = [list(range(rank.size))] if groups is None else groups
    on_npu = device == "npu" or isinstance(device, SimulatedNpu)
    backend = "hccl" if on_npu else "gloo"
    group = RecordingGroup(make_group(groups, rank.rank, backend, PATIENCE))
    placement = (model or uneven_model(8)).placement(group.size, group.rank)
    if device == "cpu":
        device = CpuDevice(timeout)
    elif device == "simulated" or device == "npu":
        device = controlled(device)
    settings = PipelineSettings(policy, GLOO, timeout, load_timeout, poison_scratch)
    memory = RankMemory(placement, num_blocks, guard, "npu" if on_npu else "cpu")
    built = Rig(memory, group, device, settings, staging_blocks)
    built.memory.store_owned(1)
    built.memory.store_drafts(1)
    return built


@contextlib.contextmanager
def rig(
    rank: Rank,
    device: Device | DeviceKind,
    *,
    policy: BroadcastPolicy = BroadcastPolicy.AUTO,
    load_timeout: float = PATIENCE,
) -> Iterator[Rig]:
    """A rig of 8 layers that is closed at the end, when all ranks have come there."""
    built = make_rig(rank, device, policy=policy, load_timeout=load_timeout)
    yield built
    built.device.compute.record().wait(PATIENCE)
    dist.barrier()
    built.close()


def abandon(built: Rig) -> None:
    """Keep a rig whose collective hangs until the process ends: gloo still writes its memory."""
    _ABANDONED.append(built)


def assert_right(results: Sequence[Sequence[str]]) -> None:
    """No rank of a scenario read a wrong byte."""
    assert not any(results), results


def assert_wrong(results: Sequence[Sequence[str]], expected: str) -> None:
    """Some rank of a scenario read wrong bytes of what it is about."""
    assert any(expected in complaint for found in results for complaint in found), results
