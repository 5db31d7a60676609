"""Rounds of random traffic in one engine, and the comparison of two engines' rounds.

The engines are those of the hardest combination: sparse attention with shared indexers, a draft
layer, two ranks, priorities, a pool that is too small, scratch memory poisoned in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.engine import tiny_models
from tests.engine.harness import Engine, Script, Trace, kvpp_off, kvpp_on, start_engine
from tests.soak.traffic import BLOCKS, make_script

__all__ = ["Report", "Round", "compare", "run_round", "soak_engine", "write_model"]


@dataclass(frozen=True, slots=True)
class Round:
    """What one engine did with the script of a seed, and what it was left with."""

    seed: int
    script: Script
    trace: Trace
    lost_blocks: int  # fewer are free than before the round
    remembered: int  # requests that a rank's history still knows, over all ranks


@dataclass(slots=True)
class Report:
    """Counts over all rounds, and what was wrong, by seed."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: dict[int, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name:28}{count:>10,}" for name, count in self.counts.items()]
        wrong = [f"seed {seed}: {'; '.join(what)}" for seed, what in self.wrong.items()]
        return "\n".join([*lines, *wrong])


def write_model(folder: Path) -> Path:
    """The checkpoint that both engines serve."""
    return tiny_models.write(folder, replace(tiny_models.SHARED, drafts=1))


@contextmanager
def soak_engine(model: Path, kvpp: bool) -> Iterator[Engine]:
    """An engine of the soak, with KVPP or without."""
    options: dict[str, Any] = {
        "blocks": BLOCKS,
        "scheduling_policy": "priority",
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    }
    with start_engine(model, kvpp_on() if kvpp else kvpp_off(), **options) as engine:
        yield engine


def run_round(engine: Engine, seed: int) -> Round:
    """Run the script of ``seed`` from an empty prefix cache to an empty one."""
    free, script = engine.free_blocks, make_script(seed)
    trace = engine.run(script)
    engine.settle()
    engine.reset_prefix_cache()
    remembered = sum(map(len, engine.call("observe_history")))
    return Round(seed, script, trace, free - engine.free_blocks, remembered)


def compare(rounds: Sequence[Round], references: Sequence[Round]) -> Report:
    """Count what happened; every difference between the traces of a seed is an error."""
    report = Report()
    for name in ("rounds", "requests", "steps", "aborted", "preempted", "prefix-hit tokens"):
        report.counts[name] = 0
    for ours, theirs in zip(rounds, references, strict=True):
        assert ours.script == theirs.script
        _count(report.counts, ours)
        answers = zip(ours.trace.answers, theirs.trace.answers, strict=True)
        wrong = [number for number, (mine, other) in enumerate(answers) if mine != other]
        report.counts["wrong outputs"] += len(wrong)
        complaints = [
            *([f"wrong outputs of requests {wrong}"] if wrong else []),
            *(["another schedule"] if ours.trace.schedule != theirs.trace.schedule else []),
            *(_left_behind("KVPP on", ours)),
            *(_left_behind("KVPP off", theirs)),
        ]
        if complaints or ours.trace != theirs.trace:
            report.wrong[ours.seed] = complaints or ["the traces differ"]
    report.counts["wrong rounds"] = len(report.wrong)
    return report


def _count(counts: Counter[str], done: Round) -> None:
    trace = done.trace
    counts["rounds"] += 1
    counts["requests"] += len(trace.answers)
    counts["steps"] += len(trace.schedule)
    counts["aborted"] += sum(
        request.aborted is not None and len(answer.tokens) < request.max_tokens
        for request, answer in zip(done.script.requests, trace.answers, strict=True)
    )
    counts["preempted"] += trace.preemptions
    counts["prefix-hit tokens"] += sum(answer.cached_tokens for answer in trace.answers)
    counts["tokens"] += sum(len(answer.tokens) for answer in trace.answers)
    counts["accepted drafts"] += trace.accepted_drafts
    counts["lost blocks"] += done.lost_blocks
    counts["remembered requests"] += done.remembered


def _left_behind(engine: str, done: Round) -> Iterator[str]:
    if done.lost_blocks:
        yield f"{engine}: {done.lost_blocks} blocks are not free"
    if done.remembered:
        yield f"{engine}: {done.remembered} requests are not forgotten"
