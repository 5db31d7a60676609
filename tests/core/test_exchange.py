"""Attention at the owner over real gloo groups: every rank gets its own heads' results."""

from __future__ import annotations

import pytest
import torch

from kvpp_core.errors import PlanError
from kvpp_core.exchange import HeadExchange
from kvpp_core.group import make_group
from tests.core.gloo_world import GlooWorld, Rank

RANKS, TOKENS, HEADS, SIZE, WIDTH = 4, 5, 2, 7, 4


def query_of(rank: int) -> torch.Tensor:
    """(tokens, heads, size), different in every element."""
    count = TOKENS * HEADS * SIZE
    return torch.arange(count, dtype=torch.float32).view(TOKENS, HEADS, SIZE) + 1000 * rank


def attention(query: torch.Tensor) -> torch.Tensor:
    """Every head by itself."""
    return query[:, :, :WIDTH] * 2 + query.sum(dim=2, keepdim=True)


def attend_everywhere(rank: Rank) -> None:
    group = make_group([range(RANKS)], rank.rank, "gloo", 30.0, with_exchange=True)
    exchange = HeadExchange(group)
    query, asked = query_of(rank.rank), []

    def at_owner(whole: torch.Tensor) -> torch.Tensor:
        asked.append(whole.shape)
        return attention(whole)

    for owner in range(RANKS):
        result = exchange.attend(owner, query, WIDTH, at_owner)
        assert torch.equal(result, attention(query))
    assert asked == [(TOKENS, RANKS * HEADS, SIZE)]  # for the one layer that this rank owns
    moved = TOKENS * HEADS * (SIZE + WIDTH) * 4
    assert exchange.bytes == RANKS * (RANKS - 1) * moved
    rank.barrier()
    group.close()


def test_every_rank_gets_its_heads_from_every_owner(world4: GlooWorld) -> None:
    world4.run(attend_everywhere)


def without_a_group_of_its_own(rank: Rank) -> None:
    group = make_group([range(2)], rank.rank, "gloo", 30.0)
    with pytest.raises(PlanError, match="without a process group for queries"):
        HeadExchange(group)
    rank.barrier()
    group.close()


def test_it_does_not_share_the_broadcasts_group(world2: GlooWorld) -> None:
    world2.run(without_a_group_of_its_own)
