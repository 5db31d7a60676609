"""Attention at the owner: a layer's query heads go to the rank that keeps it, results come back.

What moves is a query and a result for each token and head, whatever the length of the history: a
decode step reads all of its requests' history and adds one token to each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from kvpp_core.errors import PlanError
from kvpp_core.group import KvppGroup

__all__ = ["HeadExchange"]


class HeadExchange:
    """One rank's end. For the thread that runs the model; every call is collective."""

    def __init__(self, group: KvppGroup) -> None:
        """Use the group's exchange process group, so that no broadcast is met on the way.

        Raises:
            PlanError: the group was made without one.
        """
        if group.exchange is None:
            raise PlanError("the KVPP group was made without a process group for queries")
        self._ranks, self._rank, self._process_group = group.ranks, group.rank, group.exchange
        self.bytes = 0  # over the group: queries to the owners and results from them

    def attend(
        self,
        owner: int,
        query: torch.Tensor,
        width: int,
        attention: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """This rank's heads of a layer's attention, computed by group rank ``owner``.

        Args:
            owner: the same on every rank.
            query: (tokens, heads of this rank, head size); the same shape on every rank.
            width: of a result's head; results have the query's dtype.
            attention: called on the owner alone with (tokens, all heads, head size), returns
                (tokens, all heads, width). It must treat every head by itself.

        Returns:
            (tokens, heads of this rank, width).
        """
        query, root = query.contiguous(), self._ranks[owner]
        tokens, heads, _ = query.shape
        mine = query.new_empty((tokens, heads, width))
        others = len(self._ranks) - 1
        self.bytes += others * (query.nbytes + mine.nbytes)
        if self._rank != owner:
            dist.gather(query, None, root, group=self._process_group)
            dist.scatter(mine, None, root, group=self._process_group)
            return mine
        # Whatever order the group gathers in, it scatters in the same.
        queries = [torch.empty_like(query) for _ in self._ranks]
        dist.gather(query, queries, root, group=self._process_group)
        results = attention(torch.cat(queries, dim=1)).split(heads, dim=1)
        dist.scatter(mine, [r.contiguous() for r in results], root, group=self._process_group)
        return mine
