"""One rank's blocks over a store: small staging, so that it takes several batches."""

from __future__ import annotations

from kvpp_connectors.pool.block_objects import BlockObject, BlockStore, Staging
from kvpp_connectors.pool.packing import CacheBlocks, Inventory
from tests.core.rank_memory import RankMemory
from tests.pool.stores import StoreUnderTest
from tests.pool.test_packing import caches_of

__all__ = ["LAYERS", "RANKS", "STAGING", "objects", "opened"]

LAYERS, RANKS = 5, 2
STAGING = 40_000  # bytes: two objects of rank 0 at once


def opened(store: StoreUnderTest, memory: RankMemory) -> BlockStore:
    """What a rank keeps, over a store."""
    blocks = CacheBlocks(caches_of(memory), Inventory.kept(memory.placement))
    return BlockStore(store.backend, blocks, Staging(store.backend, STAGING))


def objects(prefix: str, blocks: list[int]) -> list[BlockObject]:
    """Blocks under keys of their numbers."""
    return [BlockObject(f"{prefix}{block}", block) for block in blocks]
