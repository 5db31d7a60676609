"""KVPP on = KVPP off, token for token and logprob for logprob to the last bit, and both equal
transformers. Seven layers on two ranks: an uneven split, with remote layers that share a slot.

All scripts run in one engine of each kind, whose pool of 60 blocks is too small for some of them.
Scratch memory is poisoned at the start of each step with history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvpp_connectors.demo.oracle import Questions, oracle_logprobs
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

pytestmark = [pytest.mark.engine, pytest.mark.smoke]

LAYERS, BLOCKS = 7, 60
SHARED = random_tokens(1, 64)

SCRIPTS = {
    "long decode": Script((Request(random_tokens(10, 40), max_tokens=200),)),
    "prompts longer than the token budget": Script(
        (Request(random_tokens(20, 150)), Request(random_tokens(21, 130)))
    ),
    "prefix hits": Script(
        (
            Request(SHARED + random_tokens(30, 36)),
            Request(SHARED + random_tokens(31, 20), arrives=16),
            Request(SHARED + random_tokens(30, 36), arrives=32),
        )
    ),
    "requests with and without history in one step": Script(
        (
            Request(random_tokens(40, 30), max_tokens=30),
            Request(random_tokens(41, 40), max_tokens=20, arrives=5),
            Request(random_tokens(42, 100), max_tokens=10, arrives=6),
        )
    ),
    "preemption": Script(
        tuple(Request(random_tokens(50 + n, 64), max_tokens=60) for n in range(10))
    ),
    "abort in mid-flight": Script(
        (
            Request(random_tokens(70, 120), max_tokens=40, aborted=1),  # in its prefill
            Request(random_tokens(71, 50), max_tokens=40, aborted=9),  # while decoding
            Request(random_tokens(72, 50), max_tokens=40),
            Request(random_tokens(73, 120), max_tokens=20, arrives=10),  # takes freed blocks
        )
    ),
    "blocks used again after they were freed": Script(
        tuple(Request(random_tokens(80 + n, 100), arrives=12 * n) for n in range(12))
    ),
}


@dataclass(frozen=True)
class Traces:
    """What both engines answered, and two runs with a fault in the engine with KVPP."""

    off: dict[str, Trace]
    on: dict[str, Trace]
    flipped: Trace
    without_broadcasts: Trace
    stats: list[dict[str, Any]]
    quiet_stats: list[dict[str, Any]]
    model: Path


def run_all(engine: Engine) -> dict[str, Trace]:
    """Run every script from an empty prefix cache."""
    traces = {}
    for name, script in SCRIPTS.items():
        engine.reset_prefix_cache()
        traces[name] = engine.run(script)
    engine.reset_prefix_cache()
    return traces


@pytest.fixture(scope="module")
def traces(checkpoint: Callable[[int], Path]) -> Iterator[Traces]:
    """Both engines, one after the other."""
    model = checkpoint(LAYERS)
    with start_engine(model, kvpp_off(), blocks=BLOCKS) as engine:
        off = run_all(engine)
    with start_engine(model, kvpp_on(), blocks=BLOCKS) as engine:
        # One token a request, prompts within the budget: no step has history.
        engine.run(Script((Request(random_tokens(90, 60), max_tokens=1),)))
        engine.reset_prefix_cache()
        quiet = engine.call("kvpp_stats")
        on = run_all(engine)
        stats = engine.call("kvpp_stats")
        script = SCRIPTS["long decode"]
        flipped = engine.run(script, {100: lambda e: e.call("fault_flip_bit", e.first_block())})
        engine.reset_prefix_cache()
        engine.call("fault_stop_broadcasts", None)
        without = engine.run(script)
    yield Traces(off, on, flipped, without, stats, quiet, model)


@pytest.mark.parametrize("name", SCRIPTS)
def test_answers_are_equal_to_the_last_bit(traces: Traces, name: str) -> None:
    """Same schedule, same tokens, same logprobs."""
    off, on = traces.off[name], traces.on[name]
    assert off.schedule == on.schedule
    assert [a.tokens for a in off.answers] == [a.tokens for a in on.answers]
    assert [a.logprobs for a in off.answers] == [a.logprobs for a in on.answers]
    assert off.answers == on.answers  # cached tokens and finish reasons too


@pytest.mark.parametrize("engine", ["off", "on"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_answers_equal_transformers(traces: Traces, name: str, engine: str) -> None:
    """Every logprob is within 1e-3 of a full recomputation without a cache."""
    trace = (traces.off if engine == "off" else traces.on)[name]
    pairs = zip(SCRIPTS[name].requests, trace.answers, strict=True)
    answered = [(request, answer) for request, answer in pairs if answer.tokens]
    expected = oracle_logprobs(
        traces.model,
        Questions(
            prompts=[list(request.prompt) for request, _ in answered],
            answers=[answer.tokens for _, answer in answered],
        ),
    )
    for (_, answer), reference in zip(answered, expected, strict=True):
        assert answer.logprobs == pytest.approx(reference, abs=1e-3)


def test_the_scripts_do_what_their_names_say(traces: Traces) -> None:
    """Chunks, hits, mixed steps, preemption, aborts and reuse really happen."""
    chunked = traces.on["prompts longer than the token budget"].schedule
    assert sum(any(number == 0 and tokens > 1 for number, tokens in step) for step in chunked) > 1
    assert [a.cached_tokens for a in traces.on["prefix hits"].answers] == [0, 64, 96]
    mixed = traces.on["requests with and without history in one step"].schedule
    assert any((0, 1) in step and (1, 40) in step for step in mixed)
    assert traces.on["preemption"].preemptions > 0
    aborted = traces.on["abort in mid-flight"].answers
    assert len(aborted[0].tokens) == 0 and 0 < len(aborted[1].tokens) < 40
    assert len(aborted[3].tokens) == 20
    reused = SCRIPTS["blocks used again after they were freed"].requests
    assert sum(len(request.prompt) for request in reused) > BLOCKS * 16


def test_one_flipped_bit_shows(traces: Traces) -> None:
    """The equality tests can fail: one bit of one KV byte changes logprobs."""
    clean = traces.on["long decode"].answers[0]
    broken = traces.flipped.answers[0]
    assert clean.logprobs[:100] == broken.logprobs[:100]
    assert clean.logprobs != broken.logprobs


def test_missing_broadcasts_show(traces: Traces) -> None:
    """The equality tests can fail: without broadcasts the answers are wrong."""
    clean = traces.on["long decode"].answers[0]
    assert clean.tokens != traces.without_broadcasts.answers[0].tokens


def test_steps_without_history_and_dummy_runs_move_nothing(traces: Traces) -> None:
    """After start-up and one single-step prefill no byte has been broadcast."""
    for stats in traces.quiet_stats:
        assert stats["steps"] == 1
        assert stats["bytes_total"] == 0 and stats["broadcasts"] == {}


def test_auto_moves_the_active_history_and_no_more(traces: Traces) -> None:
    """All ranks count the same bytes: at most 1.05 x active history, never more than full."""
    first, second = traces.stats
    for key in ("broadcasts", "bytes", "bytes_total", "active_history_bytes", "full_bytes"):
        assert first[key] == second[key]
    assert first["steps_with_history"] > 100
    assert 0 < first["active_history_bytes"] <= first["bytes_total"] <= first["full_bytes"]
    full = first["bytes"].get("full", 0)
    assert first["bytes_total"] - full <= 1.05 * first["active_history_bytes"]
