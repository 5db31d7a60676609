"""A pool's threads copy on the worker's own NPU, and wait for what they copied there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from kvpp_connectors.connector.facts import local_device
from kvpp_connectors.connector.threads import make_executor
from kvpp_connectors.pool.packing import CacheBlocks, Inventory
from kvpp_core.bundles import Component, LayerBundle
from tests.core.gloo_world import GlooWorld, Rank

BYTES = 4096
BOUND = 60.0
INVENTORY = Inventory.of_bundles([LayerBundle(0, (Component("a", BYTES),))])


@pytest.fixture(scope="module")
def slow_world() -> Iterator[GlooWorld]:
    """Two ranks on two NPUs whose operators take a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_SIM_DELAY_US", "op=100000")
        world = GlooWorld(2)
    yield world
    world.close()


def save_and_load(rank: Rank) -> tuple[int, bytes, bytes]:
    """The thread's device, and what lies in staging and in a block as its calls return."""
    rows = torch.full((8, BYTES), 7, dtype=torch.uint8).to("npu")
    staged = torch.zeros((2, BYTES), dtype=torch.uint8).to("npu")
    loaded = torch.full((2, BYTES), 9, dtype=torch.uint8).to("npu")
    blocks = CacheBlocks({"a": rows}, INVENTORY)
    torch.accelerator.synchronize()

    def save() -> bytes:
        blocks.gather([1, 2], staged)
        return ctypes.string_at(staged.data_ptr(), 4)

    def load() -> bytes:
        blocks.scatter(loaded, [3, 4])
        return ctypes.string_at(rows[3].data_ptr(), 4)

    with make_executor("kvpp-pool-save", device=local_device("npu")) as thread:
        device = thread.submit(torch.accelerator.current_device_index).result(BOUND)
        return device, thread.submit(save).result(BOUND), thread.submit(load).result(BOUND)


def test_npu_threads_of_every_rank_return_when_the_bytes_are_there(slow_world: GlooWorld) -> None:
    seen = slow_world.run(save_and_load)
    assert seen == [(rank, bytes([7] * 4), bytes([9] * 4)) for rank in range(2)]
