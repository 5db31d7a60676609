"""AscendStoreConnector as vLLM sees it: a thin shell around a scheduler half and a worker half."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvpp_connectors.connector.base import ConnectorShell, TransferResults, ended_well
from kvpp_connectors.connector.caches import cache_plan
from kvpp_connectors.connector.facts import local_device, rank_position
from kvpp_connectors.connector.host import own_host
from kvpp_connectors.connector.options import log_idle_keys
from kvpp_connectors.connector.process import published
from kvpp_connectors.pool.facts import object_namespace, pool_facts
from kvpp_connectors.pool.lookup import Lookup
from kvpp_connectors.pool.messages import PoolStep, PoolWorkerFacts
from kvpp_connectors.pool.metrics import PoolConnectorStats, PoolPromMetrics
from kvpp_connectors.pool.options import IDLE_KEYS
from kvpp_connectors.pool.scheduler import PoolScheduler
from kvpp_connectors.pool.stats import PoolStats
from kvpp_connectors.pool.store import create_store
from kvpp_connectors.pool.store.resilient import ResilientStore
from kvpp_connectors.pool.worker import PoolWorker

__all__ = ["AscendStoreConnector"]


class AscendStoreConnector(ConnectorShell):
    """A prefix cache in a pool that engines share. docs/pool.md."""

    _stats_class = PoolConnectorStats
    _prom_class = PoolPromMetrics

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._facts = pool_facts(vllm_config)
        self._scheduler: PoolScheduler | None = None
        self._worker: PoolWorker | None = None
        if role == KVConnectorRole.WORKER:
            self._position = rank_position()
            self._stats = PoolStats(f"pool rank {self._position.pp}/{self._position.group_rank}")
            self._store = self._connect(local_device(self._facts.device_type))
            return
        self._stats = PoolStats("pool scheduler")
        self._store = self._connect(None)
        lookup = Lookup(self._store.exist, self._stats, self._facts.options.lookup_deadline_s)
        self._scheduler = PoolScheduler(self._facts, lookup)
        log_idle_keys(self._facts.extra, IDLE_KEYS)

    # Scheduler half ---------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, ...], PoolWorkerFacts]
    ) -> None:
        """What the workers keep, by rank."""
        assert self._scheduler is not None
        self._scheduler.use(
            object_namespace(self._vllm_config, self._kv_cache_config, self._facts, metadata)
        )
        self._store.wait_at_start()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that the pool has; None while the store is being asked."""
        assert self._scheduler is not None
        tokens = self._scheduler.external_tokens(request, num_computed_tokens)
        return tokens, bool(tokens) and self._facts.options.load_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks for the loaded tokens are there."""
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """Blocks whose load has failed."""
        assert self._scheduler is not None
        self._scheduler.failed(connector_output.invalid_block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> PoolStep:
        """What the workers load and save in this step."""
        assert self._scheduler is not None
        return self._scheduler.build_step(scheduler_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: whether its blocks must stay until they are saved."""
        assert self._scheduler is not None
        return self._scheduler.finished(request, ended_well(request)), None

    # Worker half ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The caches exist."""
        kvpp = published(self._vllm_config)
        self._worker = PoolWorker(
            self._facts,
            self._position,
            kvpp,
            self._store,
            self._stats,
            local_device(self._facts.device_type),
            cache_plan(self._kv_cache_config, kvpp.layout),
            kv_caches,
        )
        self._store.wait_at_start()

    def get_handshake_metadata(self) -> PoolWorkerFacts | None:
        """What this worker keeps, for the scheduler half."""
        return self._worker.facts if self._worker is not None else None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Blocks are about to be given away: their saves end first."""
        assert self._worker is not None
        self._worker.release(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads and saves."""
        assert self._worker is not None
        self._worker.start(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Requests whose blocks are saved, whose load has ended, whose load has failed."""
        assert self._worker is not None
        return TransferResults(*self._worker.finished())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not come; vLLM recomputes or fails by kv_load_failure_policy."""
        assert self._worker is not None
        return self._worker.take_invalid_blocks()

    # Both -------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> PoolConnectorStats | None:
        """Counters since the last call; None if nothing happened."""
        return PoolConnectorStats.of(self._stats.drain())

    def shutdown(self) -> None:
        """Leave no thread behind."""
        for half in (self._worker, self._scheduler):
            if half is not None:
                half.close()
        self._store.close()

    def _connect(self, device: torch.device | None) -> ResilientStore:
        """``device``: this worker's; None for a scheduler, which only asks."""
        facts = self._facts
        store = create_store(
            facts.options.backend, facts.extra, own_host(), facts.device_type, device=device
        )
        return ResilientStore(store, self._stats, device=device)

    def _step(self) -> PoolStep:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PoolStep)
        return metadata
