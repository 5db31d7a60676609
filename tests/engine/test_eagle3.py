"""Eagle3 under KVPP: a draft model of its own with MLA, whole on each rank beside the partition.

A draft with other attention cannot be run here: vLLM on CPU finds no block size that its MLA (16
tokens) and its full attention (multiples of 32) share. tests/contract/test_placement.py lays its
caches out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine import tiny_models
from tests.engine.harness import (
    Request,
    Script,
    Trace,
    kvpp_off,
    kvpp_on,
    random_tokens,
    start_engine,
)
from tests.engine.tiny_drafts import write_eagle3

pytestmark = pytest.mark.engine

SCRIPT = Script(
    (
        Request(random_tokens(1, 100), max_tokens=60),  # longer than the token budget
        Request(random_tokens(2, 40), max_tokens=60),
        Request(random_tokens(1, 100), max_tokens=20, arrives=30),  # a prefix hit
    )
)


@dataclass(frozen=True)
class Traces:
    """Answers with KVPP off, on, and on without broadcasts."""

    off: Trace
    on: Trace
    without_broadcasts: Trace
    layout: list[dict[str, Any]]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: Any) -> Iterator[Traces]:
    """Both engines, one after the other."""
    folder = tmp_path_factory.mktemp("eagle3")
    model = tiny_models.write(folder / "target", tiny_models.MLA)
    draft = write_eagle3(folder / "eagle3", tiny_models.MLA)
    options: dict[str, Any] = {
        "blocks": 60,
        "speculative_config": {
            "method": "eagle3",
            "model": str(draft),
            "num_speculative_tokens": 2,
            "attention_backend": "CPU_MLA",
        },
    }
    with start_engine(model, kvpp_off(), **options) as engine:
        off = engine.run(SCRIPT)
    with start_engine(model, kvpp_on(), **options) as engine:
        on = engine.run(SCRIPT)
        layout = engine.call("kvpp_layout")
        engine.reset_prefix_cache()
        engine.call("fault_stop_broadcasts")
        without = engine.run(SCRIPT)
    yield Traces(off, on, without, layout)


def test_answers_are_equal_to_the_last_bit(traces: Traces) -> None:
    """Same schedule, tokens, logprobs and accepted drafts."""
    assert traces.off == traces.on
    assert traces.on.answers[2].cached_tokens > 0


def test_drafts_are_accepted(traces: Traces) -> None:
    """The draft's own cache is sound: it would guess nothing without it."""
    assert traces.on.accepted_drafts > 10


def test_the_draft_is_outside_the_partition(traces: Traces) -> None:
    """Six target layers, three a rank, and the draft's layer on both."""
    assert [rank["owned_layers"] for rank in traces.layout] == [[0, 1, 2], [3, 4, 5]]
    assert [rank["draft_layers"] for rank in traces.layout] == [[6], [6]]


def test_missing_broadcasts_show(traces: Traces) -> None:
    """The comparison can fail."""
    assert traces.on.answers != traces.without_broadcasts.answers
