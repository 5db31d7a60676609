"""A pool's worker half over one rank's known memory and a store with faults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvpp_connectors.connector.process import KvppFacts
from kvpp_connectors.pool.facts import PoolFacts
from kvpp_connectors.pool.options import PoolOptions
from kvpp_connectors.pool.stats import PoolStats
from kvpp_connectors.pool.store.resilient import GuardedBackend
from kvpp_connectors.pool.worker import PoolWorker, Ranks
from tests.core.rank_memory import RankMemory
from tests.pool.test_packing import caches_of
from tests.safety.faulty_store import FaultyStore

__all__ = ["pool_worker"]


@contextlib.contextmanager
def pool_worker(
    store: FaultyStore, memory: RankMemory, kvpp: bool, **options: Any
) -> Iterator[PoolWorker]:
    """The only worker of its engine, or with ``kvpp`` the worker of its rank."""
    facts = PoolFacts(
        options=PoolOptions(**options),
        extra={},
        loads=True,
        saves=True,
        block_size=4,
        heads_split_over=1,
        device_type="cpu",
        lag=1,
    )
    rank, ranks = memory.placement.rank, memory.placement.ranks
    keeps = KvppFacts(memory.layout) if kvpp else KvppFacts()
    stats = PoolStats("test")
    worker = PoolWorker(facts, Ranks(0, rank, ranks), keeps, GuardedBackend(store, stats), stats)
    worker.register(caches_of(memory))
    try:
        yield worker
    finally:
        store.heal()
        worker.close()
