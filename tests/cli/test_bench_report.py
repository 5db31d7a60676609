"""`python -m benchmarks report`: records to page and pictures; no benchmark is run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.base import Figures, Record, Run
from benchmarks.broadcast import BroadcastFigures, BroadcastTiming
from benchmarks.capacity import Capacity, CapacityFigures
from benchmarks.interleaved import Spread, in_turns, ratio, spread
from benchmarks.p2p import GroupTiming, P2pFigures, P2pTiming
from benchmarks.pool import PoolFigures, PoolTiming
from benchmarks.pool_engines import EngineTiming
from benchmarks.records import BENCHES, read_record
from benchmarks.startup import EngineStart, PlugInCost, StartupFigures
from benchmarks.step import StepFigures, StepTiming
from kvpp_connectors.cli.machine import Machine

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"
MACHINE = Machine("Some CPU", 2, 24 << 30, "Linux 6", "3.11", "2.13", "vllm 0.32", "mooncake 0.3")
R = Spread(1.25, 1.0, 1.5)
FIGURES: dict[str, Figures] = {
    "broadcast": BroadcastFigures(
        2,
        36,
        "little",
        [
            BroadcastTiming(64, percent, False, 1e-3, 2e-3, 1e-3, 3e-3, "runs", R, R, R, R, R)
            for percent in (1, 50)
        ],
    ),
    "step": StepFigures(
        [StepTiming(step, 1024, 0.1, R, R, R, 2048, 1024, True) for step in ("prefill", "decode")]
    ),
    "p2p": P2pFigures(
        [P2pTiming("scattered blocks", 16, 67.1, 1.0, 2.0, 3.0, 2.0, R, R)],
        [GroupTiming("scattered blocks", 16, 67.1, 1.0, 2.0, 134.2, 67.1, R)],
    ),
    "pool": PoolFigures(
        [PoolTiming("other", 64, 67.1, 1.0, 2.0, 1.0, 2.0, 0.1, 0.1, 0.1, R, R)],
        [EngineTiming(1.0, 2.0, 1.0, 2.0, R, R)],
    ),
    "startup": StartupFigures(PlugInCost(0.01, 0.02, R, R), [EngineStart(10.0, 11.0, R)]),
    "capacity": CapacityFigures([Capacity(12, 2, 96 << 20, 16, 227, 341, 227, 341)]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A record of every benchmark."""
    folder = tmp_path / "records"
    folder.mkdir()
    for name, figures in FIGURES.items():
        run = Run(
            name, f"python -m benchmarks {name}", MACHINE, "abc1234", "2026-01-01", 9.0, 0.5, 2.0
        )
        (folder / f"{name}.json").write_text(json.dumps(asdict(Record(run, figures))))
    return folder


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The real page, to be written to."""
    page = tmp_path / "benchmarks.md"
    page.write_text(DOCS.read_text())
    return page


def report(folder: Path, page: Path) -> Result:
    return CliRunner().invoke(app, ["report", str(folder), "--docs", str(page)])


def test_the_page_has_a_place_for_every_benchmark(folder: Path, page: Path) -> None:
    """What was between the markers goes, what is around them stays; every picture is linked."""
    assert FIGURES.keys() == BENCHES.keys()
    prose = "Only ratios taken inside one run mean anything"
    first = "<!-- bench: step -->"
    page.write_text(page.read_text().replace(first, f"{first}\n\nold figures"))
    assert prose in page.read_text()
    assert report(folder, page).exit_code == 0
    text = page.read_text()
    assert prose in text and "old figures" not in text
    for name in FIGURES:
        between = text.split(f"<!-- bench: {name} -->")[1].split(f"<!-- /bench: {name} -->")[0]
        assert f"Taken with `python -m benchmarks {name}` in 9 s" in between
        assert "load 0.5 before, 2.0 after" in between and "commit abc1234" in between
        assert "2 cores of Some CPU, 24 GiB" in between and "| --- |" in between
        drawn = name not in ("startup", "capacity")
        image = f"images/bench_{name}.png"
        assert (f"]({image})" in between) is drawn
        assert (page.parent / image).is_file() is drawn
    assert "| decode | 1024 | 100.00 | 1.25 (1.00–1.50) |" in text


def test_a_second_report_changes_nothing(folder: Path, page: Path) -> None:
    report(folder, page)
    files = {file: file.read_bytes() for file in (page, *page.parent.glob("images/*"))}
    assert report(folder, page).exit_code == 0
    assert {file: file.read_bytes() for file in files} == files


def test_a_benchmark_without_a_record_keeps_its_figures(folder: Path, page: Path) -> None:
    for name in FIGURES.keys() - {"step"}:
        (folder / f"{name}.json").unlink()
    before = page.read_text()
    assert report(folder, page).exit_code == 0
    first, last = "<!-- bench: step -->", "<!-- /bench: step -->"
    assert page.read_text().split(first)[0] == before.split(first)[0]
    assert page.read_text().split(last)[1] == before.split(last)[1]


@pytest.mark.parametrize("marker", ["<!-- bench: pool -->", "<!-- /bench: pool -->"])
def test_a_missing_marker_is_named_and_nothing_is_written(
    folder: Path, page: Path, marker: str
) -> None:
    text = page.read_text().replace(marker, "")
    page.write_text(text)
    result = report(folder, page)
    assert result.exit_code == 2
    assert f"the page has {marker} 0 times; expected it once" in result.stderr
    assert page.read_text() == text
    assert not (page.parent / "images").exists()


def test_a_file_that_is_no_record_is_named(folder: Path, page: Path) -> None:
    (folder / "p2p.json").write_text('{"run": {}}')
    result = report(folder, page)
    assert result.exit_code == 2 and "p2p.json is no record" in result.stderr
    (folder / "p2p.json").write_text((folder / "step.json").read_text())
    assert report(folder, page).exit_code == 2


def test_a_folder_without_records_is_an_error(tmp_path: Path, page: Path) -> None:
    result = report(tmp_path, page)
    assert result.exit_code == 2 and "has no record" in result.stderr


def test_a_record_is_read_as_it_was_written(folder: Path) -> None:
    for name, figures in FIGURES.items():
        assert read_record(folder / f"{name}.json").figures == figures


def test_wrong_results_are_problems() -> None:
    """And times are none."""
    assert [figures.problems() for figures in FIGURES.values()] == [[]] * len(FIGURES)
    (wrong,) = CapacityFigures([Capacity(12, 2, 96 << 20, 16, 227, 340, 227, 341)]).problems()
    assert "227 blocks off and 340 on, `kvpp plan` says 227 and 341" in wrong
    unequal = StepFigures([StepTiming("decode", 1024, 0.1, R, R, R, 2048, 1024, False)])
    assert len(unequal.problems()) == 1


def test_a_ratio_is_taken_within_turns_and_has_quartiles() -> None:
    seconds: dict[str, Any] = {"slow": iter((0.0, 2.0, 4.0, 6.0)), "fast": iter((0.0, 1, 1, 1))}
    turns = in_turns({way: seconds[way].__next__ for way in seconds}, 3)
    assert ratio(turns, "slow", "fast") == Spread(4.0, 3.0, 5.0)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)
    assert str(Spread(4.0, 3.0, 5.0)) == "4.00 (3.00–5.00)"
