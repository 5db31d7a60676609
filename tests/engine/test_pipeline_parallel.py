"""KVPP with pipeline stages: each stage has a group of its own, and splits its own layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpp_connectors.connector.host import own_host
from tests.engine.harness import Request, Script, kvpp_off, kvpp_on, random_tokens, start_engine

pytestmark = pytest.mark.engine

SCRIPT = Script(
    (
        Request(random_tokens(1, 100), max_tokens=12),
        Request(random_tokens(2, 90), max_tokens=12),
        Request(random_tokens(1, 100), max_tokens=12, arrives=24),  # a prefix hit
    )
)
PARTITIONS = {
    None: [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
    "7,5": [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]],
}


def scrape(port: int) -> dict[tuple[str, str | None], float]:
    """The counters of the rank at a port, by name and mode."""
    with urlopen(f"http://{own_host()}:{port}/metrics", timeout=10) as page:
        families = text_string_to_metric_families(page.read().decode())
        return {(s.name, s.labels.get("mode")): s.value for f in families for s in f.samples}


def test_two_stages_of_two_ranks_answer_like_kvpp_off(
    checkpoint: Callable[[int], Path],
    ports: Callable[[int], Sequence[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TP2 x PP2, an even and an uneven split: the same answers, owners by stage."""
    model = checkpoint(12)
    metrics_port = ports(4)[0]
    with start_engine(model, kvpp_off(), pipeline_parallel_size=2) as engine:
        expected = engine.run(SCRIPT)
    assert [answer.cached_tokens for answer in expected.answers] == [0, 0, 96]
    for partition, owned in PARTITIONS.items():
        if partition is not None:
            monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        options = kvpp_on(metrics_port=metrics_port)
        with start_engine(model, options, pipeline_parallel_size=2) as engine:
            assert engine.run(SCRIPT).answers == expected.answers
            assert [layout["owned_layers"] for layout in engine.call("kvpp_layout")] == owned
            stats = engine.call("kvpp_stats")
            assert all(rank["bytes_total"] > 0 for rank in stats)
            for rank, counted in enumerate(stats):
                shown = scrape(metrics_port + rank)
                assert shown["kvpp_steps_total", None] == counted["steps"]
                assert shown["kvpp_wait_seconds_total", None] == counted["wait_seconds"]
                for mode, count in counted["bytes"].items():
                    assert shown["kvpp_broadcast_bytes_total", mode] == count
            engine.reset_prefix_cache()
            engine.call("fault_stop_broadcasts", None)
            assert engine.run(SCRIPT).answers != expected.answers
