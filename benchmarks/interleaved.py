"""Interleaved timing of several ways to do one thing, and the spread of the figures.

A turn runs every way once, in random order, so that what ran before and other load on the machine
affect all ways alike. A ratio is the median over turns of the ratio within a turn.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Spread", "Turns", "Way", "interleave", "medians", "one_thread", "ratio", "spread"]

Way = Callable[[], float | None]  # returns its seconds if it measures itself
Turns = list[dict[str, float]]  # by turn: seconds by way


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of a figure over turns."""

    median: float
    low: float  # first quartile
    high: float  # third quartile

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def interleave(
    ways: Mapping[str, Way],
    repeats: int,
    between: Callable[[], object] = lambda: None,
    warm_ups: int = 1,
) -> Turns:
    """Time all ways in ``repeats`` turns, after ``warm_ups``; ``between`` runs after each turn."""
    turns: Turns = []
    order, chance = list(ways.items()), random.Random(0)
    for _ in range(warm_ups + repeats):
        turn = {}
        chance.shuffle(order)
        for name, way in order:
            started = time.perf_counter()
            measured = way()
            turn[name] = time.perf_counter() - started if measured is None else measured
        turns.append(turn)
        between()
    return turns[warm_ups:]


def medians(turns: Turns) -> dict[str, float]:
    """Median seconds by way."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def ratio(turns: Turns, reference: str, way: str) -> Spread:
    """Speed of ``way`` relative to ``reference``: 2.0 is half the time."""
    return spread(turn[reference] / turn[way] for turn in turns)


def spread(figures: Iterable[float]) -> Spread:
    """Median and quartiles of at least one figure."""
    known = list(figures)
    if len(known) == 1:
        return Spread(known[0], known[0], known[0])
    low, median, high = statistics.quantiles(known, n=4, method="inclusive")
    return Spread(median, low, high)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread, as workers do: it neither spreads copies nor spins beside us."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
