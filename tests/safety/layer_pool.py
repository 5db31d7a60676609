"""A rank's blocks in a pool of this process, layer by layer: real stores, faults on their way."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from kvpp_connectors.pool.block_objects import Staging
from kvpp_connectors.pool.keys import LayerId, Namespace, Shard
from kvpp_connectors.pool.messages import BlockJob, Life
from kvpp_connectors.pool.modes.layerwise import LayerStores, StepLoads
from kvpp_connectors.pool.packing import Inventory
from kvpp_connectors.pool.store.base import Backend
from kvpp_core.trace import SpanRecorder
from tests.core.rank_memory import RankMemory
from tests.pool.stores import MemCacheStandInStore
from tests.pool.test_keys import BASE, KVPP
from tests.pool.test_packing import caches_of
from tests.safety.faulty_store import FaultyStore

__all__ = ["NAMESPACE", "LayerPool", "job_of", "layer_pool", "layer_stores", "life_of"]

NAMESPACE = Namespace(BASE, KVPP)
STAGING = 1 << 20  # bytes


def life_of(name: str = "r", number: int = 0) -> Life:
    """A life of a request; the first unless told otherwise."""
    return Life(name, number)


def job_of(blocks: Sequence[int], name: str = "r") -> BlockJob:
    """A request's blocks; each has the hash of its number."""
    return BlockJob(life_of(name), tuple(blocks), tuple(bytes([block] * 32) for block in blocks))


def layer_stores(backend: Backend, memory: RankMemory) -> LayerStores:
    """All layers that a rank keeps, over a backend."""
    inventory = Inventory.kept(memory.placement)
    return LayerStores(
        backend, caches_of(memory), inventory, Staging(backend, STAGING), SpanRecorder()
    )


class LayerPool:
    """A rank's layers in a store of its own, and the loads of its steps."""

    def __init__(self, memory: RankMemory, folder: Path, prefetch: int) -> None:
        self._opened = MemCacheStandInStore(folder)
        self.store = FaultyStore(self._opened.backend)
        self.shard = Shard(0, memory.placement.rank)
        keeps = bool(Inventory.kept(memory.placement).parts)
        self._stores = layer_stores(self.store, memory) if keeps else None
        self.loads = StepLoads(self._stores, prefetch, self.shard, torch.device("cpu"))
        self.loads.expect(bundle.layer for bundle in memory.placement.bundles)

    def save(self, job: BlockJob) -> None:
        """As another engine has, before."""
        if self._stores is not None:
            self._stores.save(NAMESPACE, self.shard, job)

    def close(self) -> None:
        """Let what is held go on, and end."""
        self.store.heal()
        self.loads.close()
        self._opened.close()

    def part(self, layer: int, draft: bool = False) -> str:
        """What keys of a layer end with."""
        return f"@{LayerId(draft, layer).tag}"


@contextlib.contextmanager
def layer_pool(memory: RankMemory, prefetch: int = 1) -> Iterator[LayerPool]:
    """One that is closed in the end."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(LayerPool(memory, Path(folder), prefetch)) as pool,
    ):
        yield pool
