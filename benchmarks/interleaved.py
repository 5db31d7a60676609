"""Ways to do one thing, timed in turns, and how far the turns lie apart.

A turn runs every way once, in an order of its own: whatever comes before a way, and what else the
machine does meanwhile, meets all of them alike. A ratio is the median over turns of the ratio
within a turn.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Spread", "Turns", "Way", "in_turns", "medians", "one_thread", "ratio", "spread"]

Way = Callable[[], float | None]  # one that returns seconds has measured itself
Turns = list[dict[str, float]]  # seconds by way, for each turn


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure that each turn gave: its median and its quartiles."""

    median: float
    low: float  # a quarter of the turns lie below
    high: float  # a quarter of the turns lie above

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def in_turns(
    ways: Mapping[str, Way],
    repeats: int,
    between: Callable[[], object] = lambda: None,
    warm_ups: int = 1,
) -> Turns:
    """Time all ways ``repeats`` times, after turns that warm up; ``between`` ends each turn."""
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
    """How much faster ``way`` is than ``reference``: 2.0 is half the time."""
    return spread(turn[reference] / turn[way] for turn in turns)


def spread(figures: Iterable[float]) -> Spread:
    """The spread of at least one figure."""
    known = list(figures)
    if len(known) == 1:
        return Spread(known[0], known[0], known[0])
    low, median, high = statistics.quantiles(known, n=4, method="inclusive")
    return Spread(median, low, high)


@contextmanager
def one_thread() -> Iterator[None]:
    """One of torch's threads, as a worker has: memcpy is not spread, nobody spins beside us."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
