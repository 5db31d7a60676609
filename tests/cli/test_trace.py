"""`benchmarks trace`: its file, figures and picture, and what it says if it fails.

With a real engine: tests/engine/test_trace.py.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.trace.events import chrome_trace
from benchmarks.trace.figures import PARTS, by_kind, exchanges, layers, ranks
from benchmarks.trace.picture import draw
from benchmarks.trace.traced import RankTrace, TraceResult
from kvpp_connectors.demo import children
from kvpp_core.trace import Lane, Recording, Span, StepSpans
from tests.cli.chrome_events import check_events, events_of

MS = 10**6  # ns
START = 5_000 * MS


def span(lane: Lane, name: str, begin: float, end: float, layer: int | None = 7) -> Span:
    """Of layer 7, which rank 1 keeps; times in ms."""
    facts: dict[str, int | str] = {} if layer is None else {"owner": 1}
    if name in ("pack", "send", "unpack"):
        facts |= {"bytes": 64, "blocks": 2, "mode": "packed"}
    return Span(lane, name, layer, START + int(begin * MS), START + int(end * MS), facts)


def recordings() -> list[Recording]:
    """Two ranks, a step without history and one that broadcasts layer 7.

    Rank 1 loads it until 3 ms, packs until 4, and sends from 4 to 6; rank 0 has it at 7 and has
    unpacked it at 8.
    """
    theirs = [
        span(Lane.COMPUTE, "prefill", 0, 20, None),
        span(Lane.COMPUTE, "launch", 1, 1.5),
        span(Lane.LOAD, "load", 0.5, 3),
        span(Lane.BROADCAST, "queued", 1, 3),
        span(Lane.BROADCAST, "pack", 3, 4),
        span(Lane.BROADCAST, "send", 4, 6),
        span(Lane.WAIT, "wait", 2, 6.5),
        span(Lane.COMPUTE, "layer", 6.5, 19),
    ]
    ours = [
        span(Lane.COMPUTE, "prefill", 0, 20, None),
        span(Lane.COMPUTE, "launch", 1, 2),
        span(Lane.BROADCAST, "queued", 1, 1.5),
        span(Lane.BROADCAST, "send", 1.5, 7),
        span(Lane.BROADCAST, "unpack", 7, 8),
        span(Lane.WAIT, "wait", 2, 8.5),
        span(Lane.COMPUTE, "layer", 8.5, 19),
        span(Lane.SAVE, "save", 19, 30),
    ]
    quiet = StepSpans(0, START - 10 * MS, [span(Lane.COMPUTE, "prefill", -10, -5, None)])
    return [Recording([quiet, StepSpans(1, START, spans)], 0) for spans in (ours, theirs)]


def test_the_file_has_a_row_for_each_rank_and_lane() -> None:
    trace = json.loads(json.dumps(chrome_trace(recordings())))
    check_events(trace, ranks=2)
    broadcast, *pieces = events_of(trace, 0, "broadcast")
    assert (broadcast["name"], broadcast["ts"], broadcast["dur"]) == ("layer 7", 11000, 7000)
    assert broadcast["args"] == {
        "step": 1,
        "layer": 7,
        "owner": 1,
        "bytes": 64,
        "blocks": 2,
        "mode": "packed",
    }
    assert [piece["name"] for piece in pieces] == ["queued", "send", "unpack"]
    computed = [e["name"] for e in events_of(trace, 1, "compute")]
    assert computed == ["prefill", "prefill", "launch layer 7", "layer 7"]
    (save,) = events_of(trace, 0, "save")
    assert (save["name"], save["ts"], save["dur"]) == ("layer 7", 29000, 11000)


def test_spans_that_overlap_in_a_row_are_seen() -> None:
    """The check of this file's tests can fail."""
    broken = recordings()
    broken[0].steps[1].spans.append(span(Lane.WAIT, "wait", 8, 9))
    with pytest.raises(AssertionError):
        check_events(chrome_trace(broken), ranks=2)


def test_a_wait_is_split_by_what_it_waits_for() -> None:
    (step,) = by_kind(recordings())["prefill that loads"]
    expected = {
        # load until 3; the owner packs until 4; bytes until 7 or 6; unpacked at 8; woken
        0: {"load": 1, "owner": 1, "transport": 3, "unpack": 1, "rest": 0.5},
        1: {"load": 1, "owner": 1, "transport": 2, "unpack": 0, "rest": 0.5},
    }
    for rank, parts in expected.items():
        assert step.waited(rank) == pytest.approx({p: ms / 1e3 for p, ms in parts.items()})
    first, second = ranks([step, step])
    assert (first.share, first.launch, second.share) == pytest.approx((0.325, 0.05, 0.225))
    assert (first.step, first.waits) == pytest.approx((0.02, 0.0065))
    assert tuple(first.parts) == PARTS and sum(first.parts.values()) == pytest.approx(1)


def test_the_figures_of_a_layer() -> None:
    (figures,) = layers(by_kind(recordings())["prefill that loads"])
    assert (figures.layer, figures.owner) == (7, 1)
    assert figures.transport == pytest.approx(0.003)  # from the owner's first byte
    assert figures.broadcast == pytest.approx(0.005)
    assert (figures.compute, figures.owner_waits, figures.others_wait) == pytest.approx(
        (0.0125, 0.0045, 0.0065)
    )


def at_the_owner() -> list[Recording]:
    """Two ranks, a decode step at the owner of layer 7: rank 1, which is asked 1 ms later."""

    def spans(asked: float) -> list[Span]:
        return [
            span(Lane.COMPUTE, "decode", 0, 20, None),
            span(Lane.EXCHANGE, "queries", asked, 3),
            span(Lane.EXCHANGE, "attention", 3, 3.5 + 1.5 * (asked - 1)),
            span(Lane.EXCHANGE, "results", 3.5 + 1.5 * (asked - 1), 6),
        ]

    return [Recording([StepSpans(0, START, spans(asked))], 0) for asked in (1, 2)]


def test_the_figures_of_a_layer_that_attends_at_its_owner() -> None:
    assert by_kind(at_the_owner()) == {}
    (figures,) = exchanges(by_kind(at_the_owner(), Lane.EXCHANGE)["decode"])
    assert (figures.layer, figures.owner) == (7, 1)
    assert (figures.queries, figures.attention, figures.results, figures.whole) == pytest.approx(
        (0.002, 0.002, 0.001, 0.005)
    )


def test_steps_that_some_rank_has_dropped_do_not_count() -> None:
    ours, theirs = recordings()
    assert by_kind([ours, Recording(theirs.steps[:1], 9)]) == {}


def test_the_picture_shows_every_span_of_its_step() -> None:
    (step,) = by_kind(recordings())["prefill that loads"]
    root = ET.fromstring(draw(step, "a <title> & more"))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a <title> & more" in words
    rows = [word for word in words if word and word.startswith("rank")]
    assert rows == [
        *("rank 0 compute", "rank 0 wait", "rank 0 broadcast", "rank 0 save"),
        *("rank 1 compute", "rank 1 wait", "rank 1 broadcast", "rank 1 load"),
    ]
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "layer 7: wait, 6.500 ms" in titles
    assert len(titles) == sum(len(rank.steps[1].spans) - 1 for rank in recordings())


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.mark.parametrize("option", ["OUT", "--picture"])
def test_a_place_that_cannot_be_written_is_told_before_an_engine_starts(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "run_module", None)
    for path, text in (
        (tmp_path / "no" / "file", f"there is no folder {tmp_path / 'no'}"),
        (tmp_path, "is a folder; expected the name of a file"),
    ):
        places = [path] if option == "OUT" else [tmp_path / "out.json", "--picture", path]
        result = invoke(*places)
        assert result.exit_code == 2
        said = " ".join(result.output.replace("│", " ").split())
        assert option in said and text in said


def test_a_failed_engine_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child itself: tests/contract/test_children.py."""

    def fail(*_: object, log: Path, **__: object) -> None:
        raise children.ChildFailed(f"exit code 1. The end of {log}:\nno memory")

    monkeypatch.setattr(children, "run_module", fail)
    result = invoke(tmp_path / "out.json", "--logs", tmp_path / "logs")
    assert result.exit_code == 1
    assert "no memory" in result.output and "trace.log" in result.output
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("recorded", "table", "kept"),
    [
        (recordings, "prefill that loads: medians of 1 steps, ms", "2 of 2"),
        (at_the_owner, "decode, at the owner: medians of 1 steps, ms", "1 of 1"),
    ],
)
def test_a_run_prints_tables_and_writes_its_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded: Callable[[], list[Recording]],
    table: str,
    kept: str,
) -> None:
    result = TraceResult(ranks=[RankTrace(recording=r, layer_wait_seconds={}) for r in recorded()])

    def engine(_: str, arguments: list[str], **__: object) -> None:
        Path(arguments[1]).write_text(result.model_dump_json())

    monkeypatch.setattr(children, "run_module", engine)
    out, picture = tmp_path / "out.json", tmp_path / "step.svg"
    ran = invoke(out, "--picture", picture, "--logs", tmp_path / "logs")
    assert ran.exit_code == 0, ran.output
    check_events(json.loads(out.read_text()), ranks=2)
    assert picture.read_text().startswith("<svg")
    assert table in ran.output
    assert f"{kept} steps kept, 0 spans dropped" in ran.output
