"""`benchmarks all`: every benchmark one after the other, and one table of their main ratios.

Each runs in a process of its own: Mooncake reads the environment once, and torch's thread count is
per process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.base import Record, Table, rich_table, wide_console
from benchmarks.records import BENCHES, BadRecord, read_record, record_file

__all__ = ["bench_all"]

_HANG_S = 3600.0  # far more than any takes on a loaded machine
_LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class _Ended:
    """The result of one benchmark."""

    name: str
    record: Record | None  # None if it failed
    complaint: str  # empty if it succeeded


def bench_all(
    quick: Annotated[
        bool, typer.Option("--quick", help="Least sizes and repeats: does everything work?")
    ] = False,
    into: Annotated[
        Path | None, typer.Option(help="Folder for records and logs.", show_default="temp")
    ] = None,
) -> None:
    """Run all benchmarks, keep what they measured as JSON, and print the main ratios.

    Exit code 1 if one fails or finds a wrong result, whatever time it takes. With
    `--into benchmarks/results`, `python -m benchmarks report` then renews docs/performance.md.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvpp-bench-")) if into is None else into
    folder.mkdir(parents=True, exist_ok=True)
    console = wide_console()
    ended = []
    for name, bench in BENCHES.items():
        options = bench.quick if quick else bench.whole
        console.print(f"python -m benchmarks {' '.join((name, *options))}", highlight=False)
        ended.append(_run(name, options, folder))
    for record in [one.record for one in ended if one.record is not None][:1]:
        console.print(str(record.run.machine), highlight=False, markup=False)
    console.print(rich_table(_table(ended)))
    console.print(f"Records and logs in {folder}", highlight=False, markup=False)
    complaints = [f"{one.name}: {one.complaint}" for one in ended if one.complaint]
    for complaint in complaints:
        typer.echo(complaint, err=True)
    if complaints:
        raise typer.Exit(1)


def _run(name: str, options: Sequence[str], folder: Path) -> _Ended:
    file, log = record_file(folder, name), folder / f"{name}.log"
    command = [sys.executable, "-m", "benchmarks", name, *options, "--json"]
    with file.open("wb") as out, log.open("wb") as err:
        try:
            code = subprocess.run(
                command, stdout=out, stderr=err, timeout=_HANG_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return _Ended(name, None, f"did not end within {_HANG_S:g} s; {log}")
    last = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
    try:
        record = read_record(file)
    except BadRecord as error:
        return _Ended(name, None, f"failed with code {code}; {log} ends with\n{last}\n{error}")
    empty = [table.title for table in record.figures.tables() if not table.rows]
    wrong = "; ".join([*record.figures.problems(), *(f"no figures: {title}" for title in empty)])
    if code != 0 and not wrong:
        wrong = f"failed with code {code}; {log} ends with\n{last}"
    return _Ended(name, record, wrong)


def _table(ended: Sequence[_Ended]) -> Table:
    rows = []
    for one in ended:
        verdict = "WRONG" if one.complaint else "ok"
        if one.record is None:
            rows.append((one.name, "", "", "", verdict))
            continue
        run = one.record.run
        load = f"{run.load_before:.1f}, {run.load_after:.1f}"
        rows.append((one.name, f"{run.seconds:.0f}", load, one.record.figures.summary(), verdict))
    heads = ("benchmark", "s", "load before, after", "main ratios, least to greatest median", "")
    return Table("All benchmarks", heads, tuple(rows))
