"""MooncakeConnectorV2 as vLLM sees it: a thin shell around a scheduler half and a worker half."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvpp_connectors.connector.base import ConnectorShell, TransferResults, ended_well
from kvpp_connectors.connector.caches import cache_plan
from kvpp_connectors.connector.facts import rank_position
from kvpp_connectors.connector.options import log_idle_keys
from kvpp_connectors.connector.process import published
from kvpp_connectors.p2p.facts import p2p_facts
from kvpp_connectors.p2p.messages import StepMetadata, WorkerHandshake
from kvpp_connectors.p2p.metrics import P2pConnectorStats, P2pPromMetrics
from kvpp_connectors.p2p.options import IDLE_KEYS
from kvpp_connectors.p2p.protocol import WorkerAddress
from kvpp_connectors.p2p.scheduler import DecodeScheduler, PrefillScheduler
from kvpp_connectors.p2p.worker import P2pWorker

__all__ = ["MooncakeConnectorV2"]


class MooncakeConnectorV2(ConnectorShell):
    """Prefill/decode disaggregation over Mooncake; decode pulls. docs/p2p_protocol.md."""

    _stats_class = P2pConnectorStats
    _prom_class = P2pPromMetrics

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        facts = p2p_facts(vllm_config)
        self._prefill: PrefillScheduler | None = None
        self._decode: DecodeScheduler | None = None
        self._worker: P2pWorker | None = None
        self._counted: Counter[str] = Counter()
        if role == KVConnectorRole.WORKER:
            plan = cache_plan(kv_cache_config, published(vllm_config).layout)
            self._worker = P2pWorker(facts, rank_position(), plan, _over_pcp)
            return
        log_idle_keys(vllm_config.kv_transfer_config.kv_connector_extra_config, IDLE_KEYS)
        if facts.produces:
            self._prefill = PrefillScheduler(facts)
        if facts.consumes:
            self._decode = DecodeScheduler(facts)

    # Scheduler half ---------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, ...], WorkerHandshake]
    ) -> None:
        """The workers' endpoints, by rank."""
        if self._prefill is not None:
            self._prefill.set_handshakes(metadata)
        if self._decode is not None:
            self._decode.set_handshakes(metadata)

    def on_new_request(self, request: Any) -> None:
        """A request arrived."""
        if self._decode is not None:
            self._decode.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that decode can pull; always asynchronously."""
        if self._decode is None:
            return 0, False
        tokens = self._decode.external_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks for the pulled tokens are there."""
        if self._decode is not None:
            block_ids = blocks.get_block_ids()[0] if num_external_tokens else []
            self._decode.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Orders to the workers for this step."""
        step = StepMetadata()
        if self._prefill is not None:
            step.released = self._prefill.pop_released()
        if self._decode is not None:
            step.pulls, step.cancelled = self._decode.take_step()
            step.groups = self._decode.groups if step.pulls else {}
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers said in this step."""
        if self._decode is not None:
            self._decode.received(connector_output.finished_recving or set())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: whether its blocks must stay, and the params for decode."""
        if self._decode is not None:
            self._decode.ended(request)
        if self._prefill is None or not ended_well(request):
            return False, None
        params = self._prefill.finished(request, block_ids)
        return params is not None, params

    # Worker half ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The caches exist."""
        assert self._worker is not None
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> WorkerHandshake | None:
        """This worker's endpoint, for the scheduler half."""
        return self._worker.handshake() if self._worker is not None else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's pulls; they run beside the model."""
        assert self._worker is not None
        self._worker.start(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Leases that are over, pulls that have ended, pulls that failed."""
        assert self._worker is not None
        received, failed = self._worker.finished()
        sent = set(self._step().released)
        return TransferResults(sent, received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed pulls; vLLM recomputes or fails by kv_load_failure_policy."""
        assert self._worker is not None
        return self._worker.take_invalid_blocks()

    # Both -------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> P2pConnectorStats | None:
        """Counters since the last call; None if nothing happened."""
        if self._worker is not None:
            return P2pConnectorStats.of(self._worker.take_stats().to_dict())
        counts: Counter[str] = Counter()
        for side in (self._prefill, self._decode):
            counts.update(side.counts() if side is not None else {})
        news, self._counted = counts - self._counted, counts
        return P2pConnectorStats.of(dict(news))

    def shutdown(self) -> None:
        """Leave no thread and no port behind."""
        for part in (self._prefill, self._decode, self._worker):
            if part is not None:
                part.close()

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata


def _over_pcp(address: WorkerAddress) -> list[WorkerAddress]:
    from vllm.distributed.parallel_state import get_pcp_group

    group = get_pcp_group()
    found: list[WorkerAddress] = [address] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(found, address, group=group.cpu_group)
    return found
