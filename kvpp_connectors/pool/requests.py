"""What the pool's scheduler half knows of a running request: its blocks, and which are to be saved.

A block is saved once the step that filled it has ended well, not before: the tokens of a failed
load are computed again, and what was computed from it must not be saved. How many steps the
scheduler runs ahead of its workers' answers is the engine's ``lag``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpp_connectors.pool.messages import BlockJob

__all__ = ["Tracked"]


@dataclass(slots=True)
class Tracked:
    """One request. Positions count blocks from the start of its prompt."""

    request_id: str
    hashes: Sequence[bytes]  # vLLM's own list, which grows with the request
    blocks: list[int]
    done: int  # blocks [0, done) are in the pool, were told to be saved, or came from the cache
    holds: bool = False  # whether workers were told to save any of its blocks
    _filled: deque[tuple[int, int]] = field(default_factory=deque)  # (step, blocks filled by then)

    def scheduled(self, step: int, computed: int, filled: int) -> None:
        """In ``step`` blocks [0, computed) are there and [0, filled) will be.

        Fewer blocks than before mean that a load has failed: they are computed again.
        """
        while self._filled and self._filled[-1][1] > computed:
            self._filled.pop()
        self.done = min(self.done, computed)
        if filled > (self._filled[-1][1] if self._filled else self.done):
            self._filled.append((step, filled))

    def take_due(self, step: int, lag: int, computed: int) -> BlockJob | None:
        """Blocks that steps up to ``step - lag`` have filled, each once.

        ``computed`` is what the scheduler counts now: fewer after a load that failed.
        """
        filled = self.done
        while self._filled and self._filled[0][0] <= step - lag:
            filled = self._filled.popleft()[1]
        return self._take(min(filled, computed))

    def take_rest(self, filled: int) -> BlockJob | None:
        """The request ended well with blocks [0, filled): all that were not told before."""
        self._filled.clear()
        return self._take(filled)

    def preempted(self) -> None:
        """Its blocks are given to others: nothing that it filled is saved any more.

        Nothing reads them either, so that it holds none. vLLM takes one report of a request's end:
        one that is loading again, and is aborted, is named when its load has ended.
        """
        self._filled.clear()
        self.blocks, self.done, self.holds = [], 0, False

    def _take(self, filled: int) -> BlockJob | None:
        filled = min(filled, len(self.hashes), len(self.blocks))
        if filled <= self.done:
            return None
        span = slice(self.done, filled)
        self.done, self.holds = filled, True
        return BlockJob(self.request_id, tuple(self.blocks[span]), tuple(self.hashes[span]))
