"""Prometheus metrics of a proxy, served at /metrics."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpp_connectors.proxy.errors import RequestOutcome
from kvpp_connectors.proxy.node import Leg, Node

__all__ = ["Metrics"]

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


class Metrics:
    """Counters, gauges and histograms of one proxy, in a registry of its own."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by outcome", "outcome")
        self.retries = self._counter("retries", "Further tries, by the leg that failed", "leg")
        self.releases = self._counter("releases", "Transfers given back unused", "result")
        self.recomputes = self._counter(
            "recomputes", "Requests whose prompt decode ran itself", "reason"
        )
        self.prefill_seconds = self._histogram("prefill_seconds", "The prefill leg")
        self.first_byte_seconds = self._histogram(
            "first_byte_seconds", "Arrival of a request to the first chunk of its answer"
        )
        self.request_seconds = self._histogram("request_seconds", "A whole request")
        for outcome in RequestOutcome:
            self.requests.labels(outcome)
        for leg in Leg:
            self.retries.labels(leg)
        self._watch(tuple(nodes))

    def _watch(self, nodes: tuple[Node, ...]) -> None:
        labels = ("leg", "node")
        healthy = Gauge(
            "kvpp_proxy_node_healthy", "1 if in rotation", labels, registry=self.registry
        )
        running = Gauge(
            "kvpp_proxy_node_requests", "Requests running now", labels, registry=self.registry
        )
        for node in nodes:
            healthy.labels(node.leg, node.url).set_function(partial(_healthy, node))
            running.labels(node.leg, node.url).set_function(partial(_running, node))

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"kvpp_proxy_{name}", text, (label,), registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"kvpp_proxy_{name}", text, buckets=_SECONDS, registry=self.registry)


def _healthy(node: Node) -> float:
    return float(node.healthy)


def _running(node: Node) -> float:
    return float(node.requests)
