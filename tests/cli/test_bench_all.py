"""`python -m benchmarks all`: what fails it, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import session
from benchmarks.__main__ import app
from benchmarks.broadcast import BroadcastFigures
from benchmarks.capacity import CapacityFigures
from benchmarks.records import BENCHES, Bench, read_record

SMALL = Bench(BroadcastFigures, quick=("--layer-mib=2", "--repeats=3"))


@pytest.mark.process
def test_one_that_fails_is_named_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it printed last is shown, and its log stays."""
    broken = Bench(CapacityFigures, quick=("--no-such-option",))
    monkeypatch.setattr(session, "BENCHES", {"broadcast": SMALL, "capacity": broken})
    result = CliRunner().invoke(app, ["all", "--quick", "--into", str(tmp_path)])
    assert result.exit_code == 1
    assert "capacity: failed with code 2" in result.stderr and "broadcast:" not in result.stderr
    assert "--no-such-option" in result.stderr
    assert "--no-such-option" in (tmp_path / "capacity.log").read_text()
    record = read_record(tmp_path / "broadcast.json")
    assert record.run.command == "python -m benchmarks broadcast --layer-mib=2 --repeats=3"
    assert record.figures.summary() in " ".join(result.stdout.split())


@pytest.mark.process
def test_all_right_is_code_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "BENCHES", {"broadcast": SMALL})
    result = CliRunner().invoke(app, ["all", "--quick", "--into", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert str(tmp_path) in "".join(result.stdout.split())


def test_every_benchmark_has_a_short_form() -> None:
    commands = {"broadcast", "step", "p2p", "pool", "startup", "capacity"}
    assert BENCHES.keys() == commands
    assert all(bench.quick for bench in BENCHES.values())
