"""Blocks whose load failed within a step, until a request has computed them anew.

With the policy `recompute` vLLM leaves such blocks in its prefix cache and counts on the request
that loaded them to compute them in its next step. If that request is aborted or preempted first,
others with the same beginning take what is there for computed. The workers then report the blocks
as invalid again, in the step that reads them, so that vLLM takes its result back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvpp_connectors.vllm_api.scheduler_output import read_step

__all__ = ["SpoiltBlocks"]


class SpoiltBlocks:
    """What vLLM's block tables say of blocks that hold no request's KV. For one thread."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._written: dict[int, int] = {}  # tokens that are right again, by spoilt block
        self._tables: dict[str, list[int]] = {}
        self._reported: set[int] = set()

    def failed(self, blocks: Iterable[int]) -> None:
        """Loads of these blocks failed: what was computed after them is wrong, too."""
        found = set(blocks) - self._reported
        for table in self._tables.values() if found else ():
            first = next((i for i, block in enumerate(table) if block in found), len(table))
            self._spoil(table[first:])

    def taken(self, blocks: Iterable[int]) -> None:
        """These blocks belong to another request now: nothing in them counts as computed."""
        for block in blocks:
            self._written.pop(block, None)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._tables.pop(request_id, None)

    def read_in(self, output: Any) -> list[int]:
        """Spoilt blocks that requests of this step take for computed.

        ``output`` is vLLM's SchedulerOutput.
        """
        self._reported.clear()
        for name in output.preempted_req_ids or ():
            self.forget(name)
        for request in read_step(output).requests:
            if request.replaces:
                self._tables[request.request_id] = []
            self._tables[request.request_id] += request.block_ids
            self._check(request.request_id, request.computed_tokens, request.new_tokens)
        return sorted(self._reported)

    def _check(self, name: str, computed: int, scheduled: int) -> None:
        if not self._written:
            return
        table, end = self._tables[name], computed + scheduled
        for index, block in enumerate(table[: -(-end // self._size)]):
            start = index * self._size
            if (written := self._written.get(block)) is None:
                continue
            if computed > start + written:
                self._reported.add(block)
            elif end >= start + self._size:
                del self._written[block]
            else:
                self._written[block] = max(written, end - start)
        if not self._reported.isdisjoint(table):
            self._spoil(table[computed // self._size :])

    def _spoil(self, blocks: Iterable[int]) -> None:
        self._written.update(dict.fromkeys(blocks, 0))
