"""A rank's blocks in a pool of this process, layer by layer: real stores, faults on their way."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from kvpp_connectors.pool.keys import LayerId, Namespace, Shard
from kvpp_connectors.pool.messages import BlockJob, Life
from kvpp_connectors.pool.modes.base import RankShare
from kvpp_connectors.pool.modes.layerwise import Layerwise
from kvpp_connectors.pool.packing import Inventory
from kvpp_connectors.pool.store.base import Store
from kvpp_core.trace import SpanRecorder
from tests.core.rank_memory import RankMemory
from tests.pool.stores import MemCacheStandInStore
from tests.pool.test_keys import BASE, KVPP
from tests.pool.test_packing import caches_of
from tests.safety.faulty_store import FaultyStore

__all__ = ["NAMESPACE", "LayerPool", "job_of", "layer_pool", "life_of", "share_of"]

NAMESPACE = Namespace(BASE, KVPP)
STAGING = 1 << 20  # bytes


def life_of(name: str = "r", number: int = 0) -> Life:
    """A life of a request; the first unless told otherwise."""
    return Life(name, number)


def job_of(blocks: Sequence[int], name: str = "r") -> BlockJob:
    """A request's blocks; each has the hash of its number."""
    return BlockJob(life_of(name), tuple(blocks), tuple(bytes([block] * 32) for block in blocks))


def share_of(store: Store, memory: RankMemory) -> RankShare:
    """All that a rank keeps, over a store."""
    return RankShare(
        store=store,
        rows=caches_of(memory),
        inventory=Inventory.kept(memory.placement),
        shard=Shard(0, memory.placement.rank),
        staging_bytes=STAGING,
        device=torch.device("cpu"),
        spans=SpanRecorder(),
    )


class LayerPool:
    """A rank's layers in a store of its own, and the loads of its steps."""

    def __init__(self, memory: RankMemory, folder: Path, prefetch: int) -> None:
        self._opened = MemCacheStandInStore(folder)
        self.store = FaultyStore(self._opened.backend)
        share = share_of(self.store, memory)
        self.shard = share.shard
        self.loads = Layerwise(share, prefetch, memory.layout)

    def save(self, job: BlockJob) -> None:
        """As another engine has, before."""
        self.loads.save(NAMESPACE, job, lambda: None)

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
