"""One rank's broadcasts for Prometheus, at a port of its own.

vLLM carries what its scheduler and KV connectors count from the workers to ``/metrics``, and has no
way for anything else; KVPP works without a connector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvpp_connectors.log import get_logger
from kvpp_core.errors import KvppError
from kvpp_core.policy import Mode
from kvpp_core.stats import PipelineStats

__all__ = ["BroadcastCounters", "MetricsPage", "metrics_port"]

logger = get_logger(__name__)

_JOIN_S = 5.0
# Fields of PipelineStats.
_COUNTERS = {
    "steps": "Steps in which the model ran",
    "steps_with_history": "Steps that had something to broadcast",
    "active_history_bytes": "Bytes that the steps needed: active blocks of every layer",
    "full_bytes": "Bytes that broadcasts of whole layers would have moved",
    "wait_seconds": "Seconds in which the forward waited for broadcasts",
    "load_failures": "Layers that a KV connector did not load in time",
    "aborted_steps": "Steps that ended with an error",
}


class BroadcastCounters(Collector):
    """``kvpp_*_total``: PipelineStats as they are when somebody asks, from any thread."""

    def __init__(self, rank: int, stats: Callable[[], PipelineStats]) -> None:
        self._rank, self._stats = str(rank), stats

    def collect(self) -> Iterator[CounterMetricFamily]:
        """All counters of this rank."""
        stats = self._stats()
        for name, text in _COUNTERS.items():
            family = CounterMetricFamily(f"kvpp_{name}", text, labels=["rank"])
            family.add_metric([self._rank], getattr(stats, name))
            yield family
        sent = CounterMetricFamily(
            "kvpp_broadcasts", "Broadcasts of a layer, by what was sent", labels=["rank", "mode"]
        )
        sent_bytes = CounterMetricFamily(
            "kvpp_broadcast_bytes", "Bytes broadcast, by what was sent", labels=["rank", "mode"]
        )
        for mode in Mode:  # not over the counters, which may grow meanwhile
            sent.add_metric([self._rank, mode.value], stats.broadcasts[mode])
            sent_bytes.add_metric([self._rank, mode.value], stats.bytes[mode])
        yield from (sent, sent_bytes)


class MetricsPage:
    """``http://host:port/metrics`` until close()."""

    def __init__(self, host: str, port: int, counters: BroadcastCounters) -> None:
        """Listen.

        Raises:
            KvppError: the port is taken, or is none.
        """
        registry = CollectorRegistry()
        registry.register(counters)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise KvppError(
                f"KVPP's metrics cannot listen on {host}:{port}: {error}. Give "
                "additional_config.kvpp.metrics_port another value, or find who holds the port."
            ) from error
        logger.info("KVPP: metrics at http://%s:%d/metrics", host, port)

    def close(self) -> None:
        """Give back the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)


def metrics_port(first: int, parallel_config: Any, rank: int) -> int:
    """The port of a worker: those of an engine, and engines of a data-parallel one, in a row."""
    workers: int = parallel_config.world_size
    return first + int(parallel_config.data_parallel_rank) * workers + rank
