"""Counters on their way to vLLM's log and Prometheus: they add up, grow, and never raise.

Field report 7.1: the statistics path takes the server down.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpp_connectors.p2p.metrics import P2pConnectorStats, P2pPromMetrics
from kvpp_connectors.pool.metrics import PoolConnectorStats, PoolPromMetrics

POOL = {"get_bytes": 100, "get_us": 2_000_000, "get_missing": 3}
P2P = {"pulls": 2, "pull_bytes": 50, "pull_seconds": [0.1, 0.3], "pull_failures": {"read": 1}}
BOTH = pytest.mark.parametrize(
    ("stats", "prom", "data"),
    [
        (PoolConnectorStats, PoolPromMetrics, POOL),
        (P2pConnectorStats, P2pPromMetrics, P2P),
    ],
    ids=["pool", "p2p"],
)


@pytest.fixture
def registry() -> CollectorRegistry:
    """One for each test: names are taken once in a registry."""
    return CollectorRegistry()


def metrics(prom: Any, registry: CollectorRegistry) -> Any:
    """As vLLM makes them, for two engines."""

    def typed(kind: Any) -> Any:
        def make(**options: Any) -> Any:
            return kind(**options, registry=registry)

        return make

    types = {kind: typed(kind) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    return prom(config, types, ["model", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """By name and labels, without the time at which they were made."""
    return {
        f"{sample.name} {sorted(sample.labels.items())}": sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@BOTH
def test_intervals_add_up(stats: Any, prom: Any, data: dict[str, Any]) -> None:
    """Whichever worker or interval comes first, and with those in which nothing happened."""
    one, none = stats.of(dict(data)), stats.of({})
    assert none is None
    twice = stats.of(dict(data)).aggregate(stats.of(dict(data)))
    empty_first = stats(data={}).aggregate(stats.of(dict(data)))
    assert empty_first.data == one.data
    for key, value in twice.reduce().items():
        if "mean" not in key and "/s" not in key:
            assert value == 2 * one.reduce()[key]


@BOTH
def test_what_is_observed_only_grows(
    stats: Any, prom: Any, data: dict[str, Any], registry: CollectorRegistry
) -> None:
    """Also for an engine without news, and for a counter that is new to this version."""
    observed = metrics(prom, registry)
    before = samples(registry)
    for part in ({}, data, {"a_new_counter": 1}, data):
        observed.observe(part, 1)
        now = samples(registry)
        assert all(now[name] >= value for name, value in before.items())
        before = now
    assert any(value > 0 and "'1'" in name for name, value in before.items())
    assert not any(value > 0 and "('engine', '0')" in name for name, value in before.items())
