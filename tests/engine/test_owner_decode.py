"""Decode at the owner: the same answers to the last bit, and bytes that do not grow with context.

The scripts of test_equality.py: prefill in chunks, hits, mixed steps, preemption, aborts. Scratch
memory is poisoned at the start of each step, so that a history which is neither broadcast nor
attended to at its owner shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import (
    Engine,
    Request,
    Script,
    Trace,
    kvpp_off,
    kvpp_on,
    random_tokens,
    start_engine,
)
from tests.engine.test_equality import BLOCKS, LAYERS, SCRIPTS, run_all

pytestmark = pytest.mark.engine

CONTEXTS = (64, 448)  # tokens
DECODES = 20
HEADS, QUERY, RESULT, FLOAT = 4, 576, 512, 4


@dataclass(frozen=True)
class Runs:
    off: dict[str, Trace]
    at_owner: dict[str, Trace]
    by_context: list[dict[str, int]]  # what DECODES decode steps moved, for each of CONTEXTS
    not_exchanged: Trace


@pytest.fixture(scope="module")
def runs(checkpoint: Callable[[int], Path]) -> Iterator[Runs]:
    model = checkpoint(LAYERS)
    with start_engine(model, kvpp_off(), blocks=BLOCKS) as engine:
        off = run_all(engine)
    # `auto` attends at the owner here; test_sparse_equality.py has one that cannot, and broadcasts.
    with start_engine(model, kvpp_on(decode="auto"), blocks=BLOCKS) as engine:
        at_owner = run_all(engine)
        by_context = [moved(engine, length) for length in CONTEXTS]
        engine.reset_prefix_cache()
        engine.call("fault_decode_here")
        yield Runs(off, at_owner, by_context, engine.run(SCRIPTS["long decode"]))


def moved(engine: Engine, context: int) -> dict[str, int]:
    """Bytes that the decode steps of one request move behind a prompt of so many tokens."""
    engine.reset_prefix_cache()
    seen: list[dict[str, Any]] = []
    script = Script((Request(random_tokens(context, context), max_tokens=1 + DECODES),))
    steps = -(-context // 64)  # of the prefill, by the token budget
    engine.run(script, {steps: lambda e: seen.extend(e.call("kvpp_stats"))})
    before, after = seen[0], engine.call("kvpp_stats")[0]
    return {name: after[name] - before[name] for name in ("exchanged_bytes", "bytes_total")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_answers_are_equal_to_the_last_bit(runs: Runs, name: str) -> None:
    off, at_owner = runs.off[name], runs.at_owner[name]
    assert off.schedule == at_owner.schedule
    assert off.answers == at_owner.answers


def test_bytes_of_a_decode_step_depend_on_heads_and_not_on_context(runs: Runs) -> None:
    """All heads' queries and results once for each rank but one, and no broadcast."""
    expected = DECODES * LAYERS * HEADS * (QUERY + RESULT) * FLOAT
    assert runs.by_context == [{"exchanged_bytes": expected, "bytes_total": 0}] * len(CONTEXTS)


def test_attending_to_scratch_shows(runs: Runs) -> None:
    """The equality can fail: without the exchange the answers are wrong."""
    assert runs.not_exchanged.answers != runs.off["long decode"].answers
