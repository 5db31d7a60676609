"""KVPP with pipeline stages: each stage has a group of its own, and splits its own layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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


def test_two_stages_of_two_ranks_answer_like_kvpp_off(
    checkpoint: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TP2 x PP2, an even and an uneven split: the same answers, owners by stage."""
    model = checkpoint(12)
    with start_engine(model, kvpp_off(), pipeline_parallel_size=2) as engine:
        expected = engine.run(SCRIPT)
    assert [answer.cached_tokens for answer in expected.answers] == [0, 0, 96]
    for partition, owned in PARTITIONS.items():
        if partition is not None:
            monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        with start_engine(model, kvpp_on(), pipeline_parallel_size=2) as engine:
            assert engine.run(SCRIPT).answers == expected.answers
            assert [layout["owned_layers"] for layout in engine.call("kvpp_layout")] == owned
            stats = engine.call("kvpp_stats")
            assert all(rank["bytes_total"] > 0 for rank in stats)
            engine.reset_prefix_cache()
            engine.call("fault_stop_broadcasts", None)
            assert engine.run(SCRIPT).answers != expected.answers
