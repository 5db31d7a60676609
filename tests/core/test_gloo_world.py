"""The helper that the other tests rely on: it names a stuck or dead rank, and never hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.core.gloo_world import BOUND, GlooWorld, Rank, RankFailure

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world() -> Iterator[GlooWorld]:
    """A world of its own, because these scenarios destroy it."""
    world = GlooWorld(2)
    yield world
    world.close()


def who(rank: Rank, word: str) -> str:
    """Answer with the rank, when all have come."""
    rank.barrier()
    return f"{word} {rank.rank} of {rank.size}"


def raise_on_rank_one(rank: Rank) -> None:
    """Rank 1 raises; rank 0 waits for it in vain."""
    if rank.rank == 1:
        raise ValueError("wrong on purpose")
    rank.barrier()


def die_on_rank_one(rank: Rank) -> None:
    """Rank 1 dies."""
    if rank.rank == 1:
        os._exit(7)


def test_a_failure_is_shown_and_so_is_where_the_others_were_stuck_within_the_bound(
    world: GlooWorld,
) -> None:
    assert world.run(who, "rank") == ["rank 0 of 2", "rank 1 of 2"]
    world.bound = 1.0
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        world.run(raise_on_rank_one)
    assert time.monotonic() - started < 20.0
    assert "rank 1: Traceback" in str(failure.value)
    assert "wrong on purpose" in str(failure.value)
    assert "rank 0 was stuck, at:" in str(failure.value)
    assert "in barrier" in str(failure.value)


def test_after_a_failure_the_next_scenario_has_a_fresh_world_and_a_death_is_noticed(
    world: GlooWorld,
) -> None:
    world.bound = BOUND
    assert world.run(who, "again") == ["again 0 of 2", "again 1 of 2"]
    with pytest.raises(RankFailure, match="rank 1: died with exit code 7"):
        world.run(die_on_rank_one)
