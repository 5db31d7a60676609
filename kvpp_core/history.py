"""The active blocks of a step, found by a mirror of every request's blocks.

Section 2.3 of the specification: a forward pass with previously computed tokens in any actual
request broadcasts; others do not. The mirror follows the scheduler's output, which is the
same on every rank, so all ranks of a group find the same blocks (S8).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvpp_core.errors import KvppError, PlanError

__all__ = ["BlockHistory", "History", "ScheduledRequest", "ScheduledStep", "find_runs"]


@dataclass(frozen=True, slots=True)
class History:
    """The active blocks of a step: sorted ids, their runs [first, first + length), the pool."""

    blocks: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    num_blocks: int

    @classmethod
    def of(cls, blocks: Sequence[int], num_blocks: int) -> History:
        """The history of block ids, sorted and unique.

        Raises:
            PlanError: an id is outside the pool.
        """
        if blocks and not (blocks[0] >= 0 and blocks[-1] < num_blocks):
            raise PlanError(
                f"active blocks {blocks[0]}..{blocks[-1]} are outside a pool of {num_blocks}"
            )
        return cls(tuple(blocks), find_runs(blocks), num_blocks)


def find_runs(blocks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Runs of adjacent ids in a sorted sequence, as (first id, length)."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request of a step. ``block_ids`` replaces its known blocks or is appended to them."""

    request_id: str
    block_ids: Sequence[int]
    computed_tokens: int  # tokens computed before this step
    new_tokens: int  # tokens computed in this step
    replaces: bool  # a new or resumed request: these are all its blocks

    @property
    def is_decode(self) -> bool:
        """Whether it adds one token to its history."""
        return self.new_tokens == 1 and self.computed_tokens > 0


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The scheduler's output for one step."""

    requests: Sequence[ScheduledRequest] = ()
    finished: Collection[str] = field(default_factory=frozenset)

    @property
    def prefills(self) -> Sequence[ScheduledRequest]:
        """Its requests that are no decodes."""
        return [request for request in self.requests if not request.is_decode]

    @property
    def decode_tokens(self) -> int:
        """Its decode tokens, one for each request that decodes."""
        return len(self.requests) - len(self.prefills)

    @property
    def kind(self) -> str:
        """Prefill, decode or mixed, by what its requests do."""
        prefills = len(self.prefills)
        if prefills == len(self.requests):
            return "prefill"
        return "mixed" if prefills else "decode"


class BlockHistory:
    """Mirrors block ids per request, and names the active blocks of a step's requests."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size  # tokens
        self._blocks: dict[str, list[int]] = {}

    @property
    def blocks(self) -> Mapping[str, Sequence[int]]:
        """Block ids per request that has not finished."""
        return self._blocks

    def observe(self, step: ScheduledStep) -> None:
        """Take in what a step adds to the requests' blocks, and forget those that have finished.

        Raises:
            KvppError: the step continues a request that this mirror does not know.
        """
        for request_id in step.finished:
            self._blocks.pop(request_id, None)
        for request in step.requests:
            self._update(request)

    def active(self, requests: Iterable[ScheduledRequest]) -> tuple[int, ...]:
        """The active blocks of requests of the step that was observed last, sorted and unique.

        A block is active when it holds tokens of one of them that were computed before the step.

        Raises:
            KvppError: a request claims more computed tokens than it has blocks for.
        """
        found = [self._history_of(request) for request in requests]
        return tuple(sorted(set(chain.from_iterable(found))))

    def _update(self, request: ScheduledRequest) -> None:
        if request.replaces:
            self._blocks[request.request_id] = list(request.block_ids)
        elif request.request_id not in self._blocks:
            raise KvppError(
                f"request {request.request_id} goes on, but this rank never saw it start; "
                f"known requests: {len(self._blocks)}"
            )
        else:
            self._blocks[request.request_id].extend(request.block_ids)

    def _history_of(self, request: ScheduledRequest) -> list[int]:
        blocks = self._blocks[request.request_id]
        needed = -(-request.computed_tokens // self._block_size)
        if needed > len(blocks):
            raise KvppError(
                f"request {request.request_id} has {request.computed_tokens} computed tokens, "
                f"which take {needed} blocks of {self._block_size} tokens, but holds {len(blocks)}"
            )
        return blocks[:needed]
