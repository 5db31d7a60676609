"""The simulated NPU keeps the promises of one: late streams, events, HCCL on streams."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.distributed as dist

from kvpp_core.errors import TransferTimeout
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rig import PATIENCE
from tests.core.simulated_npu import SimulatedNpu

PAGE = 2 << 20


def _bytes_at(tensor: torch.Tensor) -> bytes:
    """What lies in device memory now, whatever the streams have still to do."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def late_copy(rank: Rank) -> dict[str, bool]:
    """A copy behind a gate, seen by memory, event, other stream and host."""
    device = SimulatedNpu(PATIENCE)
    old, new = (torch.full((64,), value, dtype=torch.uint8) for value in (1, 2))
    target, copied = old.to("npu"), old.to("npu")
    source = new.to("npu")
    gate = device.hold("transfer", "the copy")

    def copy() -> None:
        target.copy_(source)

    def go_on() -> None:
        copied.copy_(target)

    device.transfer.run(copy, "the copy")
    event = device.transfer.record()
    device.compute.wait(event, "its end")
    device.compute.run(go_on, "what follows")
    device.settle()
    seen = {
        "before": _bytes_at(target) == bytes(old.numpy()) and not event.done(),
        "other stream waits": _bytes_at(copied) == bytes(old.numpy()),
    }
    with pytest.raises(TransferTimeout):
        event.wait(0.01)
    gate.open()
    event.wait(PATIENCE)
    device.compute.record().wait(PATIENCE)
    seen["after"] = _bytes_at(target) == _bytes_at(copied) == bytes(new.numpy())
    return seen


def memory(rank: Rank) -> tuple[int, bool]:
    """The address of large memory from torch-npu's allocator within a page, and who owns it."""
    tensor = torch.empty(3 * PAGE, dtype=torch.int8, device="npu")
    return tensor.data_ptr() % PAGE, tensor.device.index == rank.rank


def gather(rank: Rank) -> list[int]:
    """all_gather and broadcast on one group of HCCL."""
    group = dist.new_group(range(rank.size), backend="hccl")
    mine = torch.tensor([rank.rank + 1]).to("npu")
    parts = torch.zeros(rank.size, dtype=torch.int64).to("npu")
    dist.all_gather_into_tensor(parts, mine, group=group)
    dist.broadcast(mine, 1, group=group)
    found = [*parts.tolist(), *mine.tolist()]
    dist.destroy_process_group(group)
    return found


def test_npu_runs_late_and_events_order_its_streams(world2: GlooWorld) -> None:
    seen = world2.run(late_copy)
    assert seen == [{"before": True, "other stream waits": True, "after": True}] * 2


def test_npu_memory_begins_at_a_page_of_the_ranks_own_device(world2: GlooWorld) -> None:
    assert world2.run(memory) == [(0, True)] * 2


def test_npu_collectives_reach_all_ranks(world2: GlooWorld) -> None:
    assert world2.run(gather) == [[1, 2, 2]] * 2
