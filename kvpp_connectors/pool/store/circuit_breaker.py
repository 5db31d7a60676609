"""A circuit breaker: after some failures in a row a store is left alone for a while.

CLOSED --failures--> OPEN --pause over--> HALF_OPEN --probe answered--> CLOSED
                       ^------probe failed------'
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import StrEnum

__all__ = ["Breaker", "BreakerState"]


class BreakerState(StrEnum):
    """Whether calls go through."""

    CLOSED = "closed"  # all do
    OPEN = "open"  # none does
    HALF_OPEN = "half open"  # the probe alone does


class Breaker:
    """The state machine. Thread-safe. It starts open: nothing is known of the store yet."""

    def __init__(
        self,
        opens_after: int,
        pause_s: float,
        longest_pause_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``pause_s`` doubles with each failed probe in a row, up to ``longest_pause_s``."""
        self._opens_after = opens_after
        self._first_pause_s = pause_s
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._changed = threading.Condition()
        self._state = BreakerState.OPEN
        self._failures = 0
        self._pause_s = pause_s
        self._probe_at = clock()  # the first one at once

    @property
    def state(self) -> BreakerState:
        """The state now."""
        with self._changed:
            return self._state

    @property
    def closed(self) -> bool:
        """Whether calls may go through."""
        return self.state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """A call that went through was answered."""
        with self._changed:
            self._failures = 0

    def failed(self) -> bool:
        """A call that went through was not answered. True if this opened the breaker."""
        with self._changed:
            if self._state is not BreakerState.CLOSED:
                return False  # it went through before the breaker opened
            self._failures += 1
            if self._failures < self._opens_after:
                return False
            self._open(self._first_pause_s)
            return True

    def probe_ended(self, answered: bool) -> None:
        """The probe of a HALF_OPEN breaker came back."""
        with self._changed:
            if self._state is not BreakerState.HALF_OPEN:
                return
            if answered:
                self._state, self._failures = BreakerState.CLOSED, 0
                self._pause_s = self._first_pause_s
                self._changed.notify_all()
            else:
                self._open(min(2 * self._pause_s, self._longest_pause_s))

    def wait_for_probe(self, stopped: Callable[[], bool]) -> bool:
        """Sleep until a probe is due and claim it. False once ``stopped``: see ``wake``."""
        with self._changed:
            while not stopped():
                due_in = self._probe_at - self._clock()
                if self._state is BreakerState.OPEN and due_in <= 0:
                    self._state = BreakerState.HALF_OPEN
                    return True
                self._changed.wait(due_in if self._state is BreakerState.OPEN else None)
            return False

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until calls go through. False if they did not in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._state is BreakerState.CLOSED, timeout=timeout_s
            )

    def wake(self) -> None:
        """Let ``wait_for_probe`` look whether it was stopped."""
        with self._changed:
            self._changed.notify_all()

    def _open(self, pause_s: float) -> None:
        self._state = BreakerState.OPEN
        self._pause_s = pause_s
        self._probe_at = self._clock() + pause_s
        self._changed.notify_all()
