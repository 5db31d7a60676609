"""A short soak: rounds of random traffic with KVPP equal those without, and leave nothing behind.

`python -m tests.soak` runs the same for as long as one likes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.engine.harness import Answer, Trace
from tests.soak.__main__ import FAULTS
from tests.soak.rounds import Report, Round, compare, run_round, soak_engine, write_model
from tests.soak.traffic import make_script

SEEDS = (100, 101, 102)


@dataclass(frozen=True)
class Soak:
    """What the comparison says of the sound rounds, and of one without broadcasts."""

    sound: Report
    broken: Report
    known_in_flight: list[list[str]]  # each rank's history while a script runs


@pytest.fixture(scope="module")
def soak(tmp_path_factory: Any) -> Iterator[Soak]:
    """All rounds with KVPP, then without."""
    model = write_model(tmp_path_factory.mktemp("soak"))
    known: list[list[str]] = []
    with soak_engine(model, kvpp=True) as engine:
        ours = [run_round(engine, seed) for seed in SEEDS]
        last = make_script(SEEDS[0])
        engine.run(last, {20: lambda e: known.extend(e.call("observe_history"))})
        engine.settle()
        engine.reset_prefix_cache()
        FAULTS["no-indexer"](engine)
        faulty = run_round(engine, SEEDS[0])
    with soak_engine(model, kvpp=False) as engine:
        theirs = [run_round(engine, seed) for seed in SEEDS]
    yield Soak(compare(ours, theirs), compare([faulty], theirs[:1]), known)


@pytest.mark.engine
def test_random_traffic_is_answered_as_without_kvpp(soak: Soak) -> None:
    """Same schedules, tokens and logprobs; no block is lost, no finished request remembered."""
    assert soak.sound.wrong == {}, str(soak.sound)


@pytest.mark.engine
def test_the_traffic_is_rough(soak: Soak) -> None:
    """Requests are preempted and aborted, share prefixes, and accept drafts."""
    counts = soak.sound.counts
    assert counts["rounds"] == len(SEEDS)
    for what in ("aborted", "preempted", "prefix-hit tokens", "accepted drafts"):
        assert counts[what] > 0, str(soak.sound)


@pytest.mark.engine
def test_a_round_without_the_indexers_bytes_is_wrong(soak: Soak) -> None:
    """The comparison can fail."""
    assert set(soak.broken.wrong) == {SEEDS[0]}
    assert soak.broken.counts["wrong outputs"] > 0


@pytest.mark.engine
def test_the_history_of_running_requests_is_seen(soak: Soak) -> None:
    """The check for forgotten requests looks at the right place: on both ranks, while they run."""
    first, second = soak.known_in_flight
    assert first and first == second


SOUND = Round(7, make_script(7), Trace([Answer([1, 2], [0.0, -1.0])], [[(0, 1)]], 0), 0, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"lost_blocks": 1},
        {"remembered": 1},
        {"trace": Trace([Answer([1, 2], [0.0, -1.0])], [[(0, 2)]], 0)},
        {"trace": Trace([Answer([1, 2], [0.0, -1.5])], [[(0, 1)]], 0)},
        {"trace": Trace([Answer([1, 2], [0.0, -1.0])], [[(0, 1)]], 1)},
    ],
    ids=["block lost", "request remembered", "schedule", "logprob", "preemptions"],
)
@pytest.mark.parametrize("side", ["on", "off"])
def test_every_difference_is_told_by_its_seed(change: dict[str, Any], side: str) -> None:
    sound = replace(SOUND, script=replace(SOUND.script, requests=SOUND.script.requests[:1]))
    changed = replace(sound, **change)
    pair = ([changed], [sound]) if side == "on" else ([sound], [changed])
    assert compare([sound], [sound]).wrong == {}
    assert set(compare(*pair).wrong) == {7}


def test_a_script_depends_on_its_seed_alone() -> None:
    assert make_script(3) == make_script(3) != make_script(4)
