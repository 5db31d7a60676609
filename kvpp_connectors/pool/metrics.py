"""The pool's counters in vLLM's log and at its Prometheus endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvpp_connectors.connector.stats import ConnectorStats

__all__ = ["PoolConnectorStats", "PoolPromMetrics"]

_UNITS = {"bytes": ("bytes", 1), "us": ("seconds", 1e-6)}


@dataclass
class PoolConnectorStats(ConnectorStats):
    """Counters of one interval, by the names of PoolStats."""


class PoolPromMetrics(KVConnectorPromMetrics):
    """``vllm:kvpp_pool_{events,bytes,seconds}_total``."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            kind: self._counter_cls(
                name=f"vllm:kvpp_pool_{kind}",
                documentation=f"{kind.capitalize()} of the KV pool, by what happened",
                labelnames=[*labelnames, "what"],
            )
            for kind in ("events", "bytes", "seconds")
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count one interval."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            what, _, unit = name.rpartition("_")
            kind, factor = _UNITS.get(unit, ("events", 1))
            if kind == "events":
                what = name
            self._counters[kind].labels(*labels, what).inc(count * factor)
