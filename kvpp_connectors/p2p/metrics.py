"""The P/D connector's counters: of its worker, in vLLM's log, at its Prometheus endpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

from kvpp_connectors.connector.stats import ConnectorStats
from kvpp_connectors.p2p.messages import PullResult

__all__ = ["P2pConnectorStats", "P2pPromMetrics", "P2pStats"]

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_COUNTERS = {
    "pulls": "Requests whose KV was pulled from a prefill engine",
    "pull_bytes": "Bytes of KV pulled from prefill engines",
    "pull_shared_bytes": "Bytes of KV that decode ranks took from each other (share_pulls)",
    "pull_shares_not_taken": "Shares of other ranks that were pulled from prefill instead",
    "leases_granted": "Requests whose KV was offered to decode",
    "leases_read": "Offers that decode has read",
    "leases_released": "Offers that decode released without having read them",
    "leases_expired": "Offers that nobody read in time",
    "leases_not_reached": "Renewals and releases that did not reach the prefill engine",
    "messages_refused": "Control messages that were refused",
}


class P2pStats:
    """Pulls of one interval: how many, bytes from where, seconds, failures by reason."""

    def __init__(self) -> None:
        self.pulls = 0
        self.bytes = 0
        self.shared_bytes = 0
        self.shares_not_taken = 0
        self.seconds: list[float] = []
        self.failures: Counter[str] = Counter()

    def record(self, result: PullResult) -> None:
        """Count one pull that has ended."""
        self.shares_not_taken += result.shares_not_taken
        if result.problem is not None:
            self.failures[result.reason] += 1
            return
        self.pulls += 1
        self.bytes += result.bytes
        self.shared_bytes += result.shared_bytes
        self.seconds.append(result.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; empty if nothing happened."""
        if not self.pulls and not self.failures:
            return {}
        return {
            "pulls": self.pulls,
            "pull_bytes": self.bytes,
            "pull_shared_bytes": self.shared_bytes,
            "pull_shares_not_taken": self.shares_not_taken,
            "pull_seconds": self.seconds,
            "pull_failures": dict(self.failures),
        }


@dataclass
class P2pConnectorStats(ConnectorStats):
    """Counters, seconds of each pull, and failures by reason, of one interval."""

    def reduce(self) -> dict[str, int | float]:
        """What one log line says."""
        seconds = self.data.get("pull_seconds", [])
        line: dict[str, int | float] = {k: v for k, v in self.data.items() if k in _COUNTERS}
        if seconds:
            line["mean pull seconds"] = round(sum(seconds) / len(seconds), 4)
            megabytes = self.data.get("pull_bytes", 0) / 1e6
            line["pull MB/s"] = round(megabytes / max(sum(seconds), 1e-9))
        failures = self.data.get("pull_failures", {})
        return line | {f"failed pulls ({reason})": count for reason, count in failures.items()}


class P2pPromMetrics(KVConnectorPromMetrics):
    """``vllm:kvpp_p2p_*``."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:kvpp_p2p_{name}", documentation=text, labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for name, text in _COUNTERS.items()
        }
        self._seconds = create_metric_per_engine(
            self._histogram_cls(
                name="vllm:kvpp_p2p_pull_seconds",
                documentation="Seconds of each pull",
                buckets=_SECONDS,
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )
        self._failures = self._counter_cls(
            name="vllm:kvpp_p2p_pull_failures",
            documentation="Pulls that failed, by reason",
            labelnames=[*labelnames, "reason"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count one interval."""
        for name, counter in self._counters.items():
            counter[engine_idx].inc(transfer_stats_data.get(name, 0))
        for seconds in transfer_stats_data.get("pull_seconds", []):
            self._seconds[engine_idx].observe(seconds)
        labels = self.per_engine_labelvalues[engine_idx]
        for reason, count in transfer_stats_data.get("pull_failures", {}).items():
            self._failures.labels(*labels, reason).inc(count)
