"""What happened to the pool: counters for metrics, and one log line for each kind of failure."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from kvpp_connectors.log import get_logger
from kvpp_connectors.pool.store.base import StoreOutcome

__all__ = ["PoolStats"]

logger = get_logger(__name__)

_LONGEST_LINE = 1500  # characters: a batch of 1000 failed keys must not drown the log


class PoolStats:
    """Counters by name, and which kinds of failure were logged. For all threads of a process.

    Names: ``<operation>_<result>`` in objects, ``<operation>_bytes``, ``<operation>_us``,
    ``lookup_*``, ``breaker_*``.
    """

    def __init__(self, rank: str) -> None:
        """``rank`` names this process in log lines."""
        self._rank = rank
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged: set[str] = set()

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        with self._lock:
            self._counts[name] += amount

    def record(self, operation: str, keys: Sequence[str], outcomes: Sequence[StoreOutcome]) -> None:
        """Count a batch's outcomes, and log each kind of failure the first time it occurs."""
        kinds: dict[tuple[str, int | None], list[int]] = {}
        for index, outcome in enumerate(outcomes):
            kinds.setdefault((outcome.result, outcome.code), []).append(index)
        for indexes in kinds.values():
            outcome = outcomes[indexes[0]]
            self.add(f"{operation}_{outcome.result.replace(' ', '_')}", len(indexes))
            if not outcome.ok:
                self.warn_once(
                    f"{operation}/{outcome.result}/{outcome.code}",
                    f"pool {operation}: {len(indexes)} of {len(keys)} objects: {outcome}; "
                    f"first key {keys[indexes[0]]}",
                )

    def warn_once(self, kind: str, message: str) -> None:
        """Log a message as a warning, once for each ``kind`` until ``recovered``."""
        with self._lock:
            if kind in self._logged:
                return
            self._logged.add(kind)
        logger.warning(
            "%s: %.*s. Requests go on without it; counted, not logged again until the pool is back",
            self._rank, _LONGEST_LINE, message,
        )  # fmt: skip

    def recovered(self) -> None:
        """Failures from now on are logged again."""
        with self._lock:
            self._logged.clear()

    def counts(self) -> dict[str, int]:
        """All counters since the start."""
        with self._lock:
            return dict(self._counts)

    def drain(self) -> dict[str, int]:
        """The counters since the last drain."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return dict(counts)
