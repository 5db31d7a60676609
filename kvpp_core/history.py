"""Which blocks hold history in a step: a mirror of every request's blocks.

Section 2.3 of the specification: a forward pass with previously computed tokens in any actual
request broadcasts; others do not. The mirror is fed from the scheduler's output, which is the
same on every rank, so all ranks of a group get the same answer (S8).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvpp_core.errors import KvppError

__all__ = ["BlockHistory", "ScheduledRequest", "ScheduledStep"]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request of a step. ``block_ids`` replaces what is known, or is appended to it."""

    request_id: str
    block_ids: Sequence[int]
    computed_tokens: int  # tokens computed before this step
    new_tokens: int  # tokens computed in this step
    replaces: bool  # a new or resumed request: the ids are all it has

    @property
    def is_decode(self) -> bool:
        """Whether it adds one token to its history."""
        return self.new_tokens == 1 and self.computed_tokens > 0


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What the scheduler decided for one step."""

    requests: Sequence[ScheduledRequest] = ()
    finished: Collection[str] = field(default_factory=frozenset)


class BlockHistory:
    """Mirrors block ids per request; answers with the active blocks of a step."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size  # tokens
        self._blocks: dict[str, list[int]] = {}

    @property
    def blocks(self) -> Mapping[str, Sequence[int]]:
        """Block ids per request that has not finished."""
        return self._blocks

    def observe(self, step: ScheduledStep) -> tuple[int, ...]:
        """Take in a step; return the ids of its active blocks, sorted and unique.

        A block is active when it holds tokens, of a request scheduled in this step, that were
        computed before it.

        Raises:
            KvppError: the step continues a request that this mirror does not know, or claims
                more computed tokens than the request has blocks for.
        """
        for request_id in step.finished:
            self._blocks.pop(request_id, None)
        active = [self._update(request) for request in step.requests]
        return tuple(sorted(set(chain.from_iterable(active))))

    def of_prefills(self, step: ScheduledStep) -> tuple[int, ...]:
        """The active blocks that requests other than decodes read; after ``observe(step)``."""
        active = [self._active(request) for request in step.requests if not request.is_decode]
        return tuple(sorted(set(chain.from_iterable(active))))

    def _update(self, request: ScheduledRequest) -> list[int]:
        if request.replaces:
            self._blocks[request.request_id] = list(request.block_ids)
        elif request.request_id not in self._blocks:
            raise KvppError(
                f"request {request.request_id} goes on, but this rank never saw it start; "
                f"known requests: {len(self._blocks)}"
            )
        else:
            self._blocks[request.request_id].extend(request.block_ids)
        return self._active(request)

    def _active(self, request: ScheduledRequest) -> list[int]:
        blocks = self._blocks[request.request_id]
        needed = -(-request.computed_tokens // self._block_size)
        if needed > len(blocks):
            raise KvppError(
                f"request {request.request_id} has {request.computed_tokens} computed tokens, "
                f"which take {needed} blocks of {self._block_size} tokens, but holds {len(blocks)}"
            )
        return blocks[:needed]
