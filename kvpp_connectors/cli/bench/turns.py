"""What the benchmarks have in common: ways to do one thing, timed in turns, and their tables.

A turn runs every way once, in an order of its own: whatever comes before a way, and what else the
machine does meanwhile, meets all of them alike. A ratio is the median over turns of the ratio
within a turn.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import typer
from rich.console import Console
from rich.table import Table

__all__ = ["Turns", "Way", "in_turns", "medians", "ratio", "show"]

Way = Callable[[], float | None]  # one that returns seconds has measured itself
Turns = list[dict[str, float]]  # seconds by way, for each turn


def in_turns(
    ways: Mapping[str, Way], repeats: int, between: Callable[[], object] = lambda: None
) -> Turns:
    """Time all ways ``repeats`` times, after a turn that warms up; ``between`` ends each turn."""
    turns: Turns = []
    order, chance = list(ways.items()), random.Random(0)
    for _ in range(repeats + 1):
        turn = {}
        chance.shuffle(order)
        for name, way in order:
            started = time.perf_counter()
            measured = way()
            turn[name] = time.perf_counter() - started if measured is None else measured
        turns.append(turn)
        between()
    return turns[1:]


def medians(turns: Turns) -> dict[str, float]:
    """Median seconds by way."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def ratio(turns: Turns, reference: str, way: str) -> float:
    """How much faster ``way`` is than ``reference``: 2.0 is half the time."""
    return statistics.median(turn[reference] / turn[way] for turn in turns)


def show(title: str, rows: Sequence[tuple[str, ...]], markdown: bool) -> None:
    """Print a table whose first row is its head."""
    heads, *body = rows
    if markdown:
        lines = [heads, tuple("---" for _ in heads), *body]
        typer.echo(f"\n{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
        return
    table = Table(*heads, title=title)
    for row in body:
        table.add_row(*row)
    Console().print(table)
