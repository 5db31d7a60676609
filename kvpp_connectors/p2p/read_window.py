"""Reads over a transfer engine, a window of them at a time, each with a status of its own.

A batch that reports failure says nothing about its other parts, which go on writing: each read here
is submitted alone, and the function returns only when every read that was submitted has ended. From
then on nothing writes to the local memory any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpp_connectors.connector.transfer_engine import Read
from kvpp_connectors.log import get_logger

__all__ = ["ReadEngine", "ReadOutcome", "read_all"]

logger = get_logger(__name__)

_PAUSE = 0.0002  # seconds between two looks at the window


class ReadEngine(Protocol):
    """What is needed of a transfer engine."""

    def start_read(self, read: Read) -> int | None:
        """Submit one read; a handle, or None if it was not accepted."""

    def poll(self, handle: int) -> bool | None:
        """True when the read is done, False when it failed, None while it runs."""


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """How a list of reads ended. ``problem`` is None if all bytes are there."""

    done_bytes: int
    problem: str | None


def read_all(
    engine: ReadEngine, reads: Sequence[Read], window: int, stop: Callable[[], str | None]
) -> ReadOutcome:
    """Do all reads, at most ``window`` at once; after the first failure submit no more.

    ``stop`` may give a reason to submit no more, too. Returns when nothing is in flight.
    """
    waiting = list(reversed(reads))
    running: list[tuple[int, Read]] = []
    done, problem = 0, None
    while running or (waiting and problem is None):
        problem = problem or stop()
        while waiting and problem is None and len(running) < window:
            read = waiting.pop()
            try:
                handle = engine.start_read(read)
            except (TypeError, ValueError, RuntimeError, OSError) as error:
                handle = None  # others may be in flight: no way out but the end of the loop
                logger.error("a read could not be submitted", exc_info=error)
            if handle is None:
                problem = f"{read.session} did not accept a read of {read.size:,} bytes"
            else:
                running.append((handle, read))
        still = []
        for handle, read in running:
            state = engine.poll(handle)
            if state is None:
                still.append((handle, read))
            elif state:
                done += read.size
            else:
                problem = problem or f"a read of {read.size:,} bytes from {read.session} failed"
        if len(still) == len(running) and still:
            time.sleep(_PAUSE)  # polling a transport that offers no event
        running = still
    return ReadOutcome(done, problem)
