"""What every benchmark gives: figures, and a record of where and how they were taken.

A benchmark is a command that measures `Figures` and hands them to `conclude`. The figures are a
dataclass whose fields are lists of rows; a `Record` of them is what `--json` prints, for all alike.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.interleaved import Spread
from kvpp_connectors.cli.machine import Machine, read_commit, read_machine

__all__ = [
    "AsJson",
    "AsMarkdown",
    "Curve",
    "Figures",
    "Picture",
    "Record",
    "Run",
    "Table",
    "conclude",
    "extent",
    "rich_table",
    "whole_numbers",
    "wide_console",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")]
_WIDTH = 140  # columns, where the output is not a terminal
_FORMATS = ("--json", "--markdown")  # say how to print, not what to measure


@dataclass(frozen=True, slots=True)
class Table:
    """Figures as text."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The title as a paragraph, then the table."""
        lines = [self.heads, tuple("---" for _ in self.heads), *self.rows]
        return f"{self.title}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True, slots=True)
class Curve:
    """Ratios over what they depend on."""

    label: str
    points: tuple[tuple[float, Spread], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn of a benchmark: curves over one axis."""

    title: str
    across: str  # the axis: what it is, and its unit
    up: str  # which ratio
    curves: tuple[Curve, ...]
    log_across: bool = False


class Figures(ABC):
    """What one benchmark measured: a dataclass whose fields are lists of rows."""

    __slots__ = ()

    @abstractmethod
    def tables(self) -> list[Table]:
        """The figures, to be read."""

    @abstractmethod
    def summary(self) -> str:
        """The main ratios in a line."""

    def picture(self) -> Picture | None:
        """What is drawn, if anything is."""
        return None

    def problems(self) -> list[str]:
        """Results that are wrong, whatever time they took."""
        return []


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a benchmark: where, when and how."""

    name: str
    command: str  # that measures the same again
    machine: Machine
    commit: str | None  # None outside of a checkout
    date: str  # UTC, at the start
    seconds: float  # it took
    load_before: float  # processes that ran or waited to, over a minute
    load_after: float

    def header(self) -> str:
        """Where, when and with what this was taken, in one line of Markdown."""
        commit = f", commit {self.commit}" if self.commit else ""
        return (
            f"Taken with `{self.command}` in {self.seconds:.0f} s on {self.date}{commit}; "
            f"{self.machine}; load {self.load_before:.1f} before, {self.load_after:.1f} after. "
            "In brackets: the quartiles over turns."
        )


@dataclass(frozen=True, slots=True)
class Record:
    """One run and its figures: what `--json` prints."""

    run: Run
    figures: Figures


def conclude(
    name: str, measure: Callable[[], Figures], as_json: bool, as_markdown: bool = False
) -> None:
    """Measure and print. Exit code 1 if a result is wrong."""
    commit, date = read_commit(), _now()  # before anybody edits what is being measured
    load, started = os.getloadavg()[0], time.perf_counter()
    figures = measure()
    run = Run(
        name=name,
        command=_command(sys.argv[1:]),
        machine=read_machine(),
        commit=commit,
        date=date,
        seconds=time.perf_counter() - started,
        load_before=load,
        load_after=os.getloadavg()[0],
    )
    record = Record(run, figures)
    if as_json:
        typer.echo(json.dumps(asdict(record), indent=2))
    else:
        _print(record, as_markdown)
    for problem in figures.problems():
        typer.echo(f"WRONG: {problem}", err=True)
    if figures.problems():
        raise typer.Exit(1)


def whole_numbers(option: str, text: str) -> list[int]:
    """The numbers of an option that takes several, with commas between them.

    Raises:
        typer.BadParameter: one of them is not a whole number of at least 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(
            f"{text!r}: expected positive whole numbers with commas between them",
            param_hint=option,
        )
    return [int(part) for part in parts]


def extent(what: str, spreads: Iterable[Spread]) -> str:
    """From the least to the greatest median, in words."""
    known = sorted(figure.median for figure in spreads)
    ends = dict.fromkeys(f"{figure:.2f}" for figure in (known[0], known[-1]))
    return f"{what} {' to '.join(ends)}"


def _print(record: Record, as_markdown: bool) -> None:
    tables = record.figures.tables()
    if as_markdown:
        typer.echo("\n\n".join([record.run.header(), *(table.markdown() for table in tables)]))
        return
    console = wide_console()
    console.print(record.run.header(), highlight=False, markup=False)
    for table in tables:
        console.print(rich_table(table))


def wide_console() -> Console:
    """The terminal, or what a pipe is taken for: wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def rich_table(table: Table) -> RichTable:
    """As a terminal shows it."""
    shown = RichTable(*table.heads, title=table.title, title_justify="left")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _command(arguments: list[str]) -> str:
    words = (word for word in arguments if word not in _FORMATS)
    return shlex.join(["python", "-m", "benchmarks", *words])


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())
