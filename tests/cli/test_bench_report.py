"""`python -m benchmarks report`: records to ratios and pictures; no benchmark is run."""

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
from benchmarks.interleaved import Spread, interleave, ratio, spread
from benchmarks.p2p import GroupTiming, P2pFigures, P2pTiming
from benchmarks.pool import PoolFigures, PoolTiming
from benchmarks.pool_engines import EngineTiming
from benchmarks.records import BENCHES, RESULTS, read_record, read_records
from benchmarks.report import MARKERS, ratios, replace
from benchmarks.startup import EngineStart, PlugInCost, StartupFigures
from benchmarks.step import StepFigures, StepTiming
from kvpp_connectors.cli.machine import Machine

DOCS = Path(__file__).parents[2] / "docs" / "performance.md"
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
    page = tmp_path / "performance.md"
    page.write_text(DOCS.read_text())
    return page


def report(folder: Path, page: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["report", str(folder), "--page", str(page), *options])


def test_the_page_has_the_ratios_of_the_published_records() -> None:
    """Every benchmark has a record in benchmarks/results, and each picture lies beside the page."""
    records = read_records(RESULTS)
    assert [record.run.name for record in records] == list(BENCHES)
    assert replace(DOCS.read_text(), ratios(records)) == DOCS.read_text()
    assert not [record.figures.problems() for record in records if record.figures.problems()]
    drawn = {f"bench_{record.run.name}.png" for record in records if record.figures.picture()}
    assert {file.name for file in (DOCS.parent / "images").glob("bench_*")} == drawn


def test_every_record_has_a_row_and_its_picture(folder: Path, page: Path) -> None:
    """What was between the markers goes, what is around them stays."""
    assert FIGURES.keys() == BENCHES.keys()
    first, last = MARKERS
    before, after = page.read_text().split(first)[0], page.read_text().split(last)[1]
    assert report(folder, page).exit_code == 0
    text = page.read_text()
    assert text.startswith(before) and text.endswith(after)
    between = text.removeprefix(before).removesuffix(after)
    for name in FIGURES:
        assert f"| `python -m benchmarks {name}` |" in between
        drawn = name not in ("startup", "capacity")
        image = f"images/bench_{name}.png"
        assert (f"]({image})" in between) is drawn
        assert (page.parent / image).is_file() is drawn
    assert "decode, owner / off 1.25 |" in between
    assert between.count("2026-01-01, abc1234, load 0.5") == len(FIGURES)


def test_tables_are_printed_and_nothing_is_written(folder: Path, page: Path) -> None:
    result = report(folder, page, "--tables")
    assert result.exit_code == 0 and page.read_text() == DOCS.read_text()
    assert not (page.parent / "images").exists()
    for name in FIGURES:
        assert f"Taken with `python -m benchmarks {name}` in 9 s" in result.stdout
    assert "load 0.5 before, 2.0 after" in result.stdout
    assert "2 cores of Some CPU, 24 GiB" in result.stdout
    assert "| decode | 1024 | 100.00 | 1.25 (1.00–1.50) |" in result.stdout


def test_a_second_report_changes_nothing(folder: Path, page: Path) -> None:
    report(folder, page)
    files = {file: file.read_bytes() for file in (page, *page.parent.glob("images/*"))}
    assert report(folder, page).exit_code == 0
    assert {file: file.read_bytes() for file in files} == files


@pytest.mark.parametrize("marker", MARKERS)
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
    turns = interleave({way: seconds[way].__next__ for way in seconds}, 3)
    assert ratio(turns, "slow", "fast") == Spread(4.0, 3.0, 5.0)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)
    assert str(Spread(4.0, 3.0, 5.0)) == "4.00 (3.00–5.00)"
