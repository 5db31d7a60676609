"""The benchmarks run to their end and print every figure; no figure is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app


def figures(*arguments: str) -> Any:
    """What a benchmark measures, in a process of its own; the rest of its JSON is checked here."""
    command = [sys.executable, "-m", "benchmarks", *arguments, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    record = json.loads(ended.stdout)
    run = record["run"]
    assert (run["name"], run["command"]) == (
        arguments[0],
        "python -m benchmarks " + " ".join(arguments),
    )
    assert run["machine"]["cores"] > 0 and run["machine"]["memory"] > 2**30 and run["seconds"] > 0
    return record["figures"]


@pytest.mark.process
@pytest.mark.timeout(400)
def test_pool() -> None:
    """Sizes that do not divide evenly, too: 4 MiB are one object of the largest."""
    rows = figures("pool", "--megabytes=4", "--repeats=3")
    kinds = [(row["memory"], row["object_kib"]) for row in rows["objects"]]
    assert kinds == [(m, kib) for m in ("other", "own") for kib in (64, 256, 1024, 4096)]
    assert rows["engines"] == []
    for row in rows["objects"]:
        assert 0 < row["load_to_raw_goodput"]["low"] <= row["load_to_raw_goodput"]["high"]
        assert all(row[way] > 0 for way in ("raw_put", "save", "raw_get", "load", "pack", "ask"))


@pytest.mark.process
@pytest.mark.timeout(400)
def test_p2p() -> None:
    rows = figures("p2p", "--megabytes=4", "--repeats=3", "--no-group")
    assert [row["block_kib"] for row in rows["pulls"]] == [16, 16, 64, 64, 256, 256, 1024, 1024]
    assert all(row["pull"] > 0 and row["raw_batch"] > 0 for row in rows["pulls"])


@pytest.mark.parametrize("wrong", ["", "64,", "64,many", "0", "-1", "1.5", "²"])
@pytest.mark.parametrize(
    ("bench", "option"),
    [
        ("step", "--contexts"),
        ("p2p", "--megabytes"),
        ("broadcast", "--layer-mib"),
        ("capacity", "--layers"),
    ],
)
def test_a_list_that_is_none_is_named(bench: str, option: str, wrong: str) -> None:
    result = CliRunner().invoke(app, [bench, f"{option}={wrong}"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert option in result.output and "positive whole numbers" in result.output
