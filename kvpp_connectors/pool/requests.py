"""One object per request on the scheduler's side: what it asks, loads, holds and saves.

A request offers each of its full blocks to the workers once in a life. Exempt are only the blocks
that the pool itself has just given it: a block from the local prefix cache may never have reached
the pool (its save found no space, or was cancelled by a preemption), or may be gone from it (it was
evicted, or the store was restarted). Only the store knows, so the workers ask it which of the
offered blocks it lacks, and save those; nothing here remembers what was saved.

A block is offered once the step that filled it, or the step in which the request first took it for
computed, has ended well: the tokens of a failed load are computed again, and what was computed from
it must not be saved. How many steps the scheduler runs ahead of its workers' answers is the
engine's ``lag``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvpp_connectors.pool.lookup import PendingLookup
from kvpp_connectors.pool.messages import BlockJob, Life
from kvpp_core.history import ScheduledRequest

__all__ = ["RequestState", "RequestTable"]


@dataclass(slots=True)
class RequestState:
    """One request. Positions count blocks from the start of its prompt."""

    request: Any  # vLLM's
    life: Life
    lookup: PendingLookup | None = None
    local_tokens: int | None = None  # found in the local prefix cache, while it waits for blocks
    load_tried: bool = False  # in this life; a load that failed would fail again
    blocks: list[int] = field(default_factory=list)  # as of the last step it was scheduled in
    holds: bool = False  # whether any of its blocks was offered in this life
    _loaded: range = range(0)  # blocks that came from the pool
    _offered: int = 0  # blocks [0, _offered) were offered, or are in _loaded
    _computed: int = 0  # blocks [0, _computed) were filled by steps that have ended
    _filled: deque[tuple[int, int]] = field(default_factory=deque)  # (step, blocks filled by then)

    def start_load(self, block_ids: Sequence[int], tokens: int, block_size: int) -> BlockJob:
        """``tokens`` tokens beyond the local ones come from the pool into these blocks."""
        computed = self.local_tokens or 0
        self.load_tried = True
        self._loaded = range(computed // block_size, -(-(computed + tokens) // block_size))
        span = slice(self._loaded.start, self._loaded.stop)
        hashes = tuple(bytes(found) for found in self.request.block_hashes[span])
        return BlockJob(self.life, tuple(block_ids[span]), hashes)

    def take_blocks(self, scheduled: ScheduledRequest) -> None:
        """The blocks of a step that it is scheduled in."""
        if scheduled.replaces:
            self.blocks, self._offered, self._computed = [], 0, 0
            self._filled.clear()
        self.blocks += scheduled.block_ids

    def scheduled(self, step: int, computed: int, filled: int) -> None:
        """In ``step`` blocks [0, computed) are there and [0, filled) will be.

        Fewer blocks than before mean that a load has failed: they are computed again.
        """
        while self._filled and self._filled[-1][1] > computed:
            self._filled.pop()
        self._computed = min(self._computed, computed)
        self._offered = min(self._offered, computed)
        self._loaded = range(self._loaded.start, min(self._loaded.stop, computed))
        if filled > (self._filled[-1][1] if self._filled else self._computed):
            self._filled.append((step, filled))

    def take_due(
        self, ended_step: int, computed: int, valid: Callable[[Sequence[int]], int] = len
    ) -> BlockJob | None:
        """Blocks that steps up to ``ended_step`` have filled, each once.

        ``computed`` is what the scheduler counts now: fewer after a load that failed. ``valid``
        says how many of some blocks, from the first, hold what they should.
        """
        while self._filled and self._filled[0][0] <= ended_step:
            self._computed = self._filled.popleft()[1]
        return self._take(min(self._computed, computed), valid)

    def take_rest(
        self, filled: int, valid: Callable[[Sequence[int]], int] = len
    ) -> BlockJob | None:
        """The request ended well with blocks [0, filled): all that were not offered before."""
        return self._take(filled, valid)

    def preempted(self, life: Life) -> None:
        """Its blocks are given to others: nothing that it filled is saved any more.

        Nothing reads them either, so that it holds none. vLLM takes one report of a request's end:
        one that is loading again, and is aborted, is named when its load has ended.
        """
        self.life, self.load_tried, self.holds = life, False, False
        self.blocks, self._loaded, self._offered, self._computed = [], range(0), 0, 0
        self._filled.clear()

    def _take(self, filled: int, valid: Callable[[Sequence[int]], int]) -> BlockJob | None:
        hashes = self.request.block_hashes
        filled = min(filled, len(hashes), len(self.blocks))
        if filled <= self._offered:
            return None
        filled = valid(self.blocks[:filled])
        positions = [i for i in range(self._offered, filled) if i not in self._loaded]
        self._offered = max(self._offered, filled)
        if not positions:
            return None
        self.holds = True
        return BlockJob(
            self.life,
            tuple(self.blocks[i] for i in positions),
            tuple(bytes(hashes[i]) for i in positions),
        )


class RequestTable:
    """All requests that the pool's scheduler half knows, by id."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._lives = count()

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def get(self, request_id: str) -> RequestState | None:
        """A request's state; None of one that is not known, or over."""
        return self._states.get(request_id)

    def admit(self, request: Any) -> RequestState:
        """The state of a request of vLLM's. Another request of the same id starts a new life."""
        state = self._states.get(request.request_id)
        if state is None or state.request is not request:
            state = RequestState(request, self._new_life(request.request_id))
            self._states[request.request_id] = state
        return state

    def preempt(self, request_id: str) -> Life | None:
        """The request starts over; the life that has ended. None: it is not known."""
        state = self._states.get(request_id)
        if state is None:
            return None
        ended = state.life
        state.preempted(self._new_life(request_id))
        return ended

    def remove(self, request_id: str) -> RequestState | None:
        """The request is over; its state."""
        return self._states.pop(request_id, None)

    def _new_life(self, request_id: str) -> Life:
        return Life(request_id, next(self._lives))
