"""Blocks whose load failed within a step, until a request has computed them anew.

With the policy `recompute` vLLM leaves such blocks in its prefix cache and counts on the request
that loaded them to compute them in its next step. If that request is aborted or preempted first,
others with the same beginning take what is there for computed. The workers then report the blocks
as invalid again, in the step that reads them, so that vLLM takes its result back.

Nor may such a block be saved, by whichever request has it in its table, before the step that
computes it anew has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["InvalidBlocks"]


class InvalidBlocks:
    """Blocks that do not hold what their place in a request's table says. For one thread."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._written: dict[int, int] = {}  # tokens that are right again, by invalid block
        self._rewritten: dict[int, int] = {}  # the step that computes a whole block anew
        self._reported: set[int] = set()  # in the step that is being built

    def failed(self, blocks: Iterable[int], tables: Iterable[Sequence[int]]) -> None:
        """Loads of these blocks failed: what requests computed after them is wrong, too.

        ``tables``: the blocks of every request.
        """
        found = set(blocks) - self._reported
        for table in tables if found else ():
            first = next((i for i, block in enumerate(table) if block in found), len(table))
            self._add(table[first:])

    def allocated(self, blocks: Iterable[int]) -> None:
        """These blocks belong to another request now: nothing in them counts as computed."""
        for block in blocks:
            self._written.pop(block, None)
            self._rewritten.pop(block, None)

    def begin_step(self, ended_step: int) -> None:
        """Before the requests of a step; steps up to ``ended_step`` have ended."""
        self._reported.clear()
        self._rewritten = {b: step for b, step in self._rewritten.items() if step > ended_step}

    def check(self, step: int, table: Sequence[int], computed: int, scheduled: int) -> None:
        """A request of a step: the blocks it has, and how many tokens it takes for computed and
        computes now."""
        if not self._written:
            return
        end = computed + scheduled
        for index, block in enumerate(table[: -(-end // self._size)]):
            start = index * self._size
            if (written := self._written.get(block)) is None:
                continue
            if computed > start + written:
                self._reported.add(block)
            elif end >= start + self._size:
                del self._written[block]
                self._rewritten[block] = step
            else:
                self._written[block] = max(written, end - start)
        if not self._reported.isdisjoint(table):
            self._add(table[computed // self._size :])

    def reported(self) -> list[int]:
        """Invalid blocks that requests of this step take for computed."""
        return sorted(self._reported)

    def valid(self, blocks: Sequence[int]) -> int:
        """How many of these blocks, from the first, hold what they should."""
        if not self._written and not self._rewritten:
            return len(blocks)
        invalid = self._written.keys() | self._rewritten.keys()
        return next((i for i, block in enumerate(blocks) if block in invalid), len(blocks))

    def _add(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._written[block] = 0
            self._rewritten.pop(block, None)
