"""Attention at the owner: a layer's query heads go to the rank that owns it, results come back.

A query and a result move per token and head, independent of the history's length: a decode step
reads all of its requests' history and adds one token to each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from kvpp_core.trace import Lane, SpanRecorder

__all__ = ["HeadExchange", "HeadGroup"]


class HeadGroup(Protocol):
    """The ranks that share a model's heads: vLLM's tensor parallel group.

    Each layer waits for these calls: this group has the engine's fastest way for small tensors, and
    no broadcast runs in it.
    """

    world_size: int
    rank_in_group: int

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """All ranks' tensors, concatenated in rank order."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors. ``input_`` may be overwritten."""


class HeadExchange:
    """One rank's end of the exchange. For the model's thread; every call is collective."""

    def __init__(self, group: HeadGroup, spans: SpanRecorder) -> None:
        self._group, self._spans = group, spans
        self.bytes = 0  # over the group: queries to the owners and results from them

    def attend(
        self,
        layer: int,
        owner: int,
        query: torch.Tensor,
        width: int,
        attention: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """This rank's heads of a layer's attention, computed by group rank ``owner``.

        Args:
            layer: index of the layer; the same on every rank.
            owner: its owner's group rank; the same on every rank.
            query: (tokens, heads of this rank, head size); the same shape on every rank.
            width: elements of a result per head; results have the query's dtype.
            attention: called on the owner alone with (tokens, all heads, head size), returns
                (tokens, all heads, width). Heads must be independent of each other.

        Returns:
            (tokens, heads of this rank, width), contiguous.
        """
        tokens, heads, _ = query.shape
        ranks, rank = self._group.world_size, self._group.rank_in_group
        # Not a gather to the owner: vLLM's, over shared memory, does not hold back a rank that is
        # calls ahead, and a rank that owns no layer for a while hangs.
        begun = time.monotonic_ns()
        whole = self._group.all_gather(query.contiguous(), 1)
        gathered = time.monotonic_ns()
        if rank == owner:
            results = attention(whole)
        else:
            results = query.new_zeros((tokens, ranks * heads, width))
        attended = time.monotonic_ns()
        self.bytes += (ranks - 1) * (whole.nbytes + results.nbytes)
        # Only one summand is not zero: the sum is exact in any order.
        mine = self._group.all_reduce(results)[:, rank * heads : (rank + 1) * heads]
        if self._spans.on:
            returned = time.monotonic_ns()
            for name, begin, end, nbytes in (
                ("queries", begun, gathered, whole.nbytes),
                ("attention", gathered, attended, 0),
                ("results", attended, returned, results.nbytes),
            ):
                self._spans.add(
                    Lane.EXCHANGE, name, begin, end, layer, owner=owner, tokens=tokens,
                    bytes=(ranks - 1) * nbytes,
                )  # fmt: skip
        return mine.contiguous()
