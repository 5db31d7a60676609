"""What our connectors answer vLLM alike: whole requests are moved, and never inside a layer."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

__all__ = ["ConnectorShell", "TransferResults", "ended_well"]


class _Results(NamedTuple):
    """In place of vLLM's class, which 0.23 does not have."""

    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


TransferResults: Any = getattr(base, "KVConnectorTransferResults", _Results)


class ConnectorShell(KVConnectorBase_V1, SupportsHMA):
    """The part of a connector that does not depend on what it moves, nor where to."""

    _stats_class: ClassVar[Any]  # a KVConnectorStats
    _prom_class: ClassVar[Any]  # a KVConnectorPromMetrics

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """`request_finished` where there may be several cache groups; we serve one."""
        answer: tuple[bool, dict[str, Any] | None] = self.request_finished(request, block_ids[0])
        return answer

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """`get_transfer_results` as vLLM 0.23 asks; which loads failed it sees by their blocks."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads end before the model runs, or hold the layer's broadcast."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: what leaves this engine leaves it after its step."""

    def wait_for_save(self) -> None:
        """Nothing to wait for: saves do not hold the step."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """The class that adds the counters up."""
        return cls._stats_class(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        """Their export to Prometheus."""
        return cls._prom_class(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def ended_well(request: Any) -> bool:
    """Whether all its tokens were computed; of an aborted one's last step that is not known."""
    from vllm.v1.request import RequestStatus

    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
