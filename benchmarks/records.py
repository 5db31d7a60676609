"""Every benchmark by its name, and records of them that were kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from benchmarks.base import Figures, Record, Run
from benchmarks.broadcast import BroadcastFigures
from benchmarks.capacity import CapacityFigures
from benchmarks.p2p import P2pFigures
from benchmarks.pool import PoolFigures
from benchmarks.startup import StartupFigures
from benchmarks.step import StepFigures

__all__ = [
    "BENCHES",
    "RESULTS",
    "BadRecord",
    "Bench",
    "read_record",
    "read_records",
    "record_file",
]

RESULTS = Path(__file__).parent / "results"  # the records whose ratios docs/performance.md has


@dataclass(frozen=True, slots=True)
class Bench:
    """The type of a benchmark's figures, and its options in `benchmarks all`."""

    figures: type[Figures]
    whole: tuple[str, ...] = ()  # options of a full run, whose figures are published
    quick: tuple[str, ...] = ()  # options of a quick run, which shows that it works


# An engine of two ranks takes most of a minute of processor time to start: --quick has five.
BENCHES: Mapping[str, Bench] = {
    "broadcast": Bench(BroadcastFigures, quick=("--layer-mib=16", "--repeats=3")),
    "step": Bench(StepFigures, ("--repeats=4",), ("--contexts=1024", "--repeats=3")),
    "p2p": Bench(P2pFigures, quick=("--megabytes=4", "--repeats=3")),
    "pool": Bench(PoolFigures, ("--engines",), ("--megabytes=4", "--repeats=3")),
    "startup": Bench(StartupFigures, quick=("--repeats=3", "--processes=1", "--starts=0")),
    "capacity": Bench(CapacityFigures, quick=("--layers=6", "--memory-mib=32")),
}


class BadRecord(Exception):
    """A file that is not a record of its benchmark. The message names it."""


def record_file(folder: Path, name: str) -> Path:
    """The file of a benchmark's record."""
    return folder / f"{name}.json"


def read_record(file: Path) -> Record:
    """The record of the benchmark that the file is named after.

    Raises:
        BadRecord: it holds something else, or a record of an older shape.
    """
    name = file.stem
    try:
        content = json.loads(file.read_text())
        record = Record(
            TypeAdapter(Run).validate_python(content["run"]),
            TypeAdapter(BENCHES[name].figures).validate_python(content["figures"]),
        )
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise BadRecord(
            f"{file} is no record of `python -m benchmarks {name}` ({error}); expected what its "
            "--json prints"
        ) from error
    if record.run.name != name:
        raise BadRecord(f"{file} is a record of {record.run.name!r}; expected one of {name!r}")
    return record


def read_records(folder: Path) -> list[Record]:
    """All records of a folder, in the order of the benchmarks.

    Raises:
        BadRecord: there is none, or one of them cannot be read.
    """
    files = [record_file(folder, name) for name in BENCHES]
    records = [read_record(file) for file in files if file.is_file()]
    if not records:
        names = ", ".join(file.name for file in files)
        raise BadRecord(f"{folder} has no record; expected at least one of {names}")
    return records
