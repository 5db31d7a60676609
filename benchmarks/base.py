"""The base of all benchmarks: their figures, and records of where and how these were taken.

A benchmark is a command that measures `Figures` and passes them to `conclude`. `--json` prints a
`Record` of them.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
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
    "curves_of",
    "extent",
    "logs_aside",
    "rich_table",
    "whole_numbers",
    "wide_console",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")]
_TAIL = 25  # lines of a log that are shown
_WIDTH = 140  # columns, where the output is not a terminal
_FORMATS = ("--json", "--markdown")  # options that do not change the figures


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
    """Ratios over the x axis."""

    label: str
    points: tuple[tuple[float, Spread], ...]  # x, ratio


def curves_of(points: Iterable[tuple[str, float, Spread]]) -> tuple[Curve, ...]:
    """Curves of points (label, x, ratio), by label in order of appearance."""
    curves: dict[str, list[tuple[float, Spread]]] = {}
    for label, x, ratio in points:
        curves.setdefault(label, []).append((float(x), ratio))
    return tuple(Curve(label, tuple(of)) for label, of in curves.items())


@dataclass(frozen=True, slots=True)
class Picture:
    """The picture of a benchmark: curves over one axis."""

    title: str
    x_label: str  # with the unit
    y_label: str  # the ratio
    curves: tuple[Curve, ...]
    log_x: bool = False


class Figures(ABC):
    """Figures of one benchmark: a dataclass whose fields are lists of rows."""

    __slots__ = ()

    @abstractmethod
    def tables(self) -> list[Table]:
        """The figures as tables."""

    @abstractmethod
    def summary(self) -> str:
        """The main ratios as one line."""

    def picture(self) -> Picture | None:
        """The picture of the ratios, if there is one."""
        return None

    def problems(self) -> list[str]:
        """Wrong results; times are none."""
        return []


@dataclass(frozen=True, slots=True)
class Run:
    """Where, when and how a benchmark ran."""

    name: str
    command: str  # repeats the run
    machine: Machine
    commit: str | None  # None outside of a checkout
    date: str  # UTC, at the start
    seconds: float  # of the whole run
    load_before: float  # load average of a minute
    load_after: float

    def header(self) -> str:
        """The run as one line of Markdown."""
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
    commit, date = read_commit(), _now()  # at the start: the checkout may change meanwhile
    load, started = os.getloadavg()[0], time.perf_counter()
    with logs_aside(name):
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


@contextmanager
def logs_aside(name: str) -> Iterator[None]:
    """What this process and its children print while the block runs goes to a log.

    Engines, Mooncake and ranks of gloo write there; the report has the tables alone. If the block
    fails, the end of the log is shown, and its path.
    """
    with ExitStack() as stack:
        log = Path(tempfile.mkdtemp(prefix=f"kvpp-bench-{name}-")) / "log"
        file = stack.enter_context(log.open("ab"))
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            stack.callback(_restore, os.dup(number), number)
            os.dup2(file.fileno(), number)
        try:
            yield
        except BaseException:
            stack.close()
            lines = log.read_text(errors="replace").splitlines()[-_TAIL:]
            typer.echo("\n".join([f"{name} failed. The end of {log}:", *lines]), err=True)
            raise
    shutil.rmtree(log.parent)


def _restore(saved: int, number: int) -> None:
    (sys.stdout, sys.stderr)[number - 1].flush()
    os.dup2(saved, number)
    os.close(saved)


def whole_numbers(option: str, text: str) -> list[int]:
    """The numbers in an option's comma-separated list.

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
    """The least and the greatest median as text."""
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
    """A console for the tables: wide enough where the output is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def rich_table(table: Table) -> RichTable:
    """The table for a terminal."""
    shown = RichTable(*table.heads, title=table.title, title_justify="left")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _command(arguments: list[str]) -> str:
    kept = (argument for argument in arguments if argument not in _FORMATS)
    return shlex.join(["python", "-m", "benchmarks", *kept])


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())
