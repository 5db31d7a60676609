"""A pool's worker half over one rank's known memory and a store with faults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from kvpp_connectors.connector.caches import CachePlan
from kvpp_connectors.connector.facts import RankPosition
from kvpp_connectors.connector.process import KvppFacts
from kvpp_connectors.pool.facts import PoolFacts
from kvpp_connectors.pool.options import PoolOptions
from kvpp_connectors.pool.stats import PoolStats
from kvpp_connectors.pool.store.resilient import ResilientStore
from kvpp_connectors.pool.worker import PoolWorker
from tests.core.rank_memory import RankMemory
from tests.pool.test_packing import caches_of
from tests.safety.faulty_store import FaultyStore

__all__ = ["pool_worker"]


@contextlib.contextmanager
def pool_worker(
    store: FaultyStore,
    memory: RankMemory,
    kvpp: bool,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a value, made once
    **options: Any,
) -> Iterator[PoolWorker]:
    """The only worker of its engine, or with ``kvpp`` the worker of its rank.

    ``device`` is what its threads are told; the memory is the processor's.
    """
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
    resilient = ResilientStore(store, stats, device=device)
    caches = caches_of(memory)
    plan = CachePlan(
        next(iter(caches.values())).shape[0],
        {name: frozenset({rows.shape[1]}) for name, rows in caches.items()},
        keeps.layout,
    )
    worker = PoolWorker(
        facts,
        RankPosition(tp=rank, tp_size=ranks),
        keeps,
        resilient,
        stats,
        device,
        plan,
        caches,
    )
    resilient.wait_at_start()
    try:
        yield worker
    finally:
        store.heal()
        worker.close()
        resilient.close()
