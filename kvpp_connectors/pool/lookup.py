"""How many blocks of a request's prefix the pool has, asked away from the scheduler's thread.

The scheduler asks, may wait a bounded moment, and else comes back in a later step. One thread asks
the store for all waiting requests together, each key once. Whatever goes wrong, the answer is a
shorter prefix: never an exception, never a wait beyond the deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpp_connectors.connector.threads import start_thread
from kvpp_connectors.pool.stats import PoolStats
from kvpp_connectors.pool.store.base import PoolUnavailable

__all__ = ["Blocks", "Hit", "Lookup", "PendingLookup"]

_JOIN_S = 15.0
_FRESH_S = 2.0  # a hit is believed: stores hold what was found for 5 s or more
_LEAST_SHARE = 64  # keys that each request may ask at least in one round

Blocks = Sequence[Sequence[str]]
_Fixed = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest prefix whose blocks have all their shards in the pool."""

    blocks: int
    shortened_by: str | None = None  # why it may be too short: the first missing key, or a failure


@dataclass(slots=True, eq=False)
class PendingLookup:
    """One request's lookup, kept by whoever asks. Guarded by the lock of its Lookup."""

    blocks: _Fixed
    deadline: float
    cursor: int = 0  # blocks [0, cursor) are known to be there
    hit: Hit | None = None
    answered: float = 0.0  # when the hit was found
    started: float = field(default_factory=time.monotonic)

    def slice(self, keys: int) -> _Fixed:
        """The next blocks, with about ``keys`` keys together."""
        width = max(1, len(self.blocks[self.cursor]))
        return self.blocks[self.cursor : self.cursor + max(1, keys // width)]


class Lookup:
    """The thread that asks, and the lookups it has not answered. Methods are for the scheduler's
    thread."""

    def __init__(
        self,
        exist: Callable[[Sequence[str]], list[bool]],
        stats: PoolStats,
        deadline_s: float = 0.5,
        batch_keys: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread.

        Args:
            exist: Store.exist; may raise PoolUnavailable.
            stats: for counters and log lines.
            deadline_s: a request that got no answer for so long goes on with what is known.
            batch_keys: most keys in one call of ``exist``.
            clock: seconds.
        """
        self._exist = exist
        self._stats = stats
        self._deadline_s = deadline_s
        self._batch_keys = batch_keys
        self._clock = clock
        self._changed = threading.Condition()
        self._open: list[PendingLookup] = []  # in the order in which they were asked
        self._closed = False
        self._call_since: float | None = None  # when the running call of ``exist`` began
        self._thread = start_thread(
            "kvpp-pool-lookup",
            self._run,
            "requests get no blocks from the pool any more; restart the engine",
        )

    def ask(
        self,
        request_id: str,
        known: PendingLookup | None,
        blocks: Blocks,
        wait_s: float = 0.0,
    ) -> PendingLookup:
        """The lookup of a request; its ``hit`` is None where it is not known yet: ask again in a
        later step.

        Args:
            request_id: for the log.
            known: what the request's last ``ask`` gave, if there was one. It is good for the same
                blocks until it is 2 s old: a request may wait for blocks much longer than the store
                keeps what it has.
            blocks: the keys that each block needs, in order; other keys than before ask anew.
            wait_s: how long to wait here at most.
        """
        with self._changed:
            if known is None or self._is_old(known) or not _same(known.blocks, blocks):
                known = self._submit(known, blocks)
            job = known
            if job.hit is None:
                left_s = min(wait_s, job.deadline - self._clock())
                if left_s > 0:
                    self._changed.wait_for(lambda: job.hit is not None, timeout=left_s)
            if job.hit is None and self._clock() >= job.deadline:
                self._stats.add("lookup_deadline_passed")
                self._stats.warn_once(
                    "lookup/deadline",
                    f"no answer for a lookup within {self._deadline_s:g} s (request {request_id}, "
                    f"{len(blocks)} blocks)",
                )
                self._end(job, "the lookup's deadline passed")
            return job

    def forget(self, known: PendingLookup | None) -> None:
        """Nobody waits for this answer any more. Again is legal, and so is None."""
        with self._changed:
            if known is not None and known.hit is None:
                self._end(known, "forgotten")

    @property
    def waiting(self) -> int:
        """Requests without an answer."""
        with self._changed:
            return len(self._open)

    def close(self) -> None:
        """End the thread. Lookups after it hit nothing. Again is legal."""
        with self._changed:
            self._closed = True
            for job in list(self._open):
                self._end(job, "closed")
            self._changed.notify_all()
        self._thread.join(_JOIN_S)

    def _submit(self, previous: PendingLookup | None, blocks: Blocks) -> PendingLookup:
        fixed = tuple(tuple(keys) for keys in blocks)
        job = PendingLookup(fixed, self._clock() + self._deadline_s)
        if previous is not None and previous.hit is None:
            self._end(previous, "asked anew")
        self._open.append(job)
        self._stats.add("lookup_requests")
        if (at_once := self._known_end(fixed)) is not None:
            self._end(job, at_once or None)
        self._changed.notify_all()
        return job

    def _is_old(self, job: PendingLookup) -> bool:
        found = job.hit is not None and job.hit.blocks > 0
        return found and self._clock() - job.answered > _FRESH_S

    def _known_end(self, blocks: _Fixed) -> str | None:
        """Why nothing needs to be asked ("": nothing to ask for), or None."""
        if self._closed:
            return "closed"
        if not all(blocks):
            return "a block without keys, which no pool can have"
        if self._call_since is not None and self._clock() - self._call_since > self._deadline_s:
            return f"the pool has not answered for {self._clock() - self._call_since:.1f} s"
        return None if blocks else ""

    def _run(self) -> None:
        while (round_ := self._next_round()) is not None:
            keys = list(dict.fromkeys(k for _, part in round_ for block in part for k in block))
            try:
                found = dict(zip(keys, self._exist(keys), strict=True))
            except PoolUnavailable as error:
                self._stats.add("lookup_failed", len(round_))
                self._stats.warn_once("lookup/unavailable", f"lookup of {len(keys)} keys: {error}")
                self._answer_failed([job for job, _ in round_], str(error))
            else:
                self._stats.add("lookup_keys", len(keys))
                self._answer(round_, found)

    def _next_round(self) -> list[tuple[PendingLookup, _Fixed]] | None:
        """Wait for lookups to do; the next keys of each, one call's worth. None: closed."""
        with self._changed:
            self._call_since = None
            self._changed.wait_for(lambda: self._closed or bool(self._open))
            if self._closed:
                return None
            share = max(_LEAST_SHARE, self._batch_keys // len(self._open))
            round_: list[tuple[PendingLookup, _Fixed]] = []
            total = 0
            for job in self._open:
                part = job.slice(min(share, self._batch_keys))
                size = sum(len(block) for block in part)
                if round_ and total + size > self._batch_keys:
                    break
                round_.append((job, part))
                total += size
            self._call_since = self._clock()
            return round_

    def _answer(self, round_: list[tuple[PendingLookup, _Fixed]], found: dict[str, bool]) -> None:
        with self._changed:
            for job, part in round_:
                if job.hit is not None:
                    continue  # its deadline passed, or it was forgotten
                for block in part:
                    missing = next((key for key in block if not found[key]), None)
                    if missing is not None:
                        self._end(job, missing)
                        break
                    job.cursor += 1
                if job.hit is None and job.cursor == len(job.blocks):
                    self._end(job, None)
            self._changed.notify_all()

    def _answer_failed(self, jobs: Sequence[PendingLookup], reason: str) -> None:
        with self._changed:
            for job in jobs:
                if job.hit is None:
                    self._end(job, reason)
            self._changed.notify_all()

    def _end(self, job: PendingLookup, shortened_by: str | None) -> None:
        job.hit, job.answered = Hit(job.cursor, shortened_by), self._clock()
        self._open.remove(job)
        self._stats.add("lookup_blocks_asked", len(job.blocks))
        self._stats.add("lookup_blocks_hit", job.cursor)
        self._stats.add("lookup_us", int((time.monotonic() - job.started) * 1e6))


def _same(known: _Fixed, asked: Blocks) -> bool:
    """Whether a request asks what it asked before. Hashes are chained: the last block tells."""
    return len(known) == len(asked) and (not known or known[-1] == tuple(asked[-1]))
