"""Attention at the owner over real gloo groups: every rank gets its own heads' results."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist

from kvpp_core.exchange import HeadExchange
from kvpp_core.trace import SpanRecorder
from tests.core.gloo_world import GlooWorld, Rank

RANKS, TOKENS, HEADS, SIZE, WIDTH = 4, 5, 2, 7, 4


class GlooHeads:
    """The world as a HeadGroup; vLLM's own is under it in tests/engine."""

    def __init__(self) -> None:
        self.world_size, self.rank_in_group = dist.get_world_size(), dist.get_rank()

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        parts = [torch.empty_like(input_) for _ in range(self.world_size)]
        dist.all_gather(parts, input_)
        return torch.cat(parts, dim)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(input_)
        return input_


def query_of(rank: int) -> torch.Tensor:
    """(tokens, heads, size), different in every element."""
    count = TOKENS * HEADS * SIZE
    return torch.arange(count, dtype=torch.float32).view(TOKENS, HEADS, SIZE) + 1000 * rank


def attention(query: torch.Tensor) -> torch.Tensor:
    """Every head by itself."""
    return query[:, :, :WIDTH] * 2 + query.sum(dim=2, keepdim=True)


def attend_everywhere(rank: Rank) -> None:
    spans = SpanRecorder()
    spans.start(1)
    spans.begin_step(0)
    exchange = HeadExchange(GlooHeads(), spans)
    query, asked = query_of(rank.rank), []

    def at_owner(whole: torch.Tensor) -> torch.Tensor:
        asked.append(whole.shape)
        return attention(whole)

    for layer, owner in enumerate(range(RANKS)):
        result = exchange.attend(layer, owner, query, WIDTH, at_owner)
        assert torch.equal(result, attention(query))
    assert asked == [(TOKENS, RANKS * HEADS, SIZE)]  # for the one layer that this rank owns
    moved = RANKS * TOKENS * HEADS * (SIZE + WIDTH) * 4
    assert exchange.bytes == RANKS * (RANKS - 1) * moved
    found = spans.take().steps[0].spans
    assert [(span.layer, span.name) for span in found] == [
        (layer, name) for layer in range(RANKS) for name in ("queries", "attention", "results")
    ]
    assert sum(int(span.facts["bytes"]) for span in found) == exchange.bytes
    assert all(one.end == two.begin for one, two in pairwise(found) if one.layer == two.layer)
    rank.barrier()


def test_every_rank_gets_its_heads_from_every_owner(world4: GlooWorld) -> None:
    world4.run(attend_everywhere)
