"""A worker's own page of counters, without an engine; tests/engine has it with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from urllib.request import urlopen

import pytest

from kvpp_connectors.engine.metrics import BroadcastCounters, MetricsPage, metrics_port
from kvpp_core.errors import KvppError
from kvpp_core.stats import PipelineStats


def test_a_taken_port_is_an_error_that_names_the_option_and_close_gives_it_back(
    ports: Callable[[int], Sequence[int]],
) -> None:
    (port,) = ports(1)
    counters = BroadcastCounters(3, PipelineStats)
    for _ in range(2):
        page = MetricsPage("127.0.0.1", port, counters)
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                assert b'kvpp_steps_total{rank="3"} 0.0' in answer.read()
            with pytest.raises(KvppError, match=rf"127.0.0.1:{port}.*kvpp.metrics_port"):
                MetricsPage("127.0.0.1", port, counters)
        finally:
            page.close()
    with pytest.raises(KvppError, match="metrics_port"):
        MetricsPage("127.0.0.1", 65536, counters)


def test_workers_and_replicas_take_ports_in_a_row() -> None:
    engines = [SimpleNamespace(world_size=4, data_parallel_rank=dp) for dp in range(2)]
    ports = [metrics_port(9400, engine, rank) for engine in engines for rank in range(4)]
    assert ports == list(range(9400, 9408))
