"""Lookups: the right prefix, few questions, and never a wait beyond the bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvpp_connectors.pool.lookup import Blocks, Hit, Lookup, PendingLookup
from kvpp_connectors.pool.stats import PoolStats
from kvpp_connectors.pool.store.base import PoolUnavailable
from tests.pool.scripted import ScriptedStore

WAIT_S = 20.0
SHARDS = ("pp0r0", "pp0r1", "pp1r0")


def blocks(name: str, count: int) -> list[tuple[str, ...]]:
    """The keys of a prompt's blocks."""
    return [tuple(f"{name}{i}@{shard}" for shard in SHARDS) for i in range(count)]


def keys(name: str, count: int) -> set[str]:
    return {key for block in blocks(name, count) for key in block}


class Lookups:
    """A Lookup, and what requests asked of it, by name."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._lookup = Lookup(*arguments, **more)
        self._asked: dict[str, PendingLookup] = {}

    def ask(self, name: str, blocks: Blocks, wait_s: float = 0.0) -> Hit | None:
        """As the scheduler does."""
        asked = self._asked[name] = self._lookup.ask(name, self._asked.get(name), blocks, wait_s)
        return asked.hit

    def forget(self, name: str) -> None:
        """As the scheduler does."""
        self._lookup.forget(self._asked.pop(name, None))

    @property
    def waiting(self) -> int:
        """As of the Lookup."""
        return self._lookup.waiting

    def close(self) -> None:
        """As of the Lookup."""
        self._lookup.close()


@pytest.fixture
def backend() -> ScriptedStore:
    return ScriptedStore()


def gated(backend: ScriptedStore) -> tuple[threading.Event, threading.Event]:
    """The store tells when it is asked, and answers when it may."""
    entered, gate = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        gate.wait(WAIT_S)

    backend.gate = wait
    return entered, gate


@pytest.fixture
def stats() -> PoolStats:
    return PoolStats("pool scheduler")


@pytest.fixture
def lookup(backend: ScriptedStore, stats: PoolStats) -> Iterator[Lookups]:
    opened = Lookups(backend.exist, stats, deadline_s=WAIT_S)
    yield opened
    opened.close()


@pytest.mark.parametrize("there", [0, 1, 7, 63, 64, 65, 399, 400])
def test_the_longest_prefix_of_whole_blocks_is_hit(
    lookup: Lookups, backend: ScriptedStore, there: int
) -> None:
    backend.keys = keys("p", there)
    hit = lookup.ask("r", blocks("p", 400), WAIT_S)
    assert hit == Hit(there, None if there == 400 else f"p{there}@pp0r0")


@pytest.mark.parametrize("shard", SHARDS)
def test_a_block_needs_every_shard(lookup: Lookups, backend: ScriptedStore, shard: str) -> None:
    backend.keys = keys("p", 5) - {f"p2@{shard}"}
    assert lookup.ask("r", blocks("p", 5), WAIT_S) == Hit(2, f"p2@{shard}")


def test_a_lookup_is_one_batch_and_is_asked_once(lookup: Lookups, backend: ScriptedStore) -> None:
    """Field report 6.2: keys = blocks x shards, in one batch, none asked again."""
    backend.keys = keys("p", 64)
    for _ in range(5):
        assert lookup.ask("r", blocks("p", 64), WAIT_S) == Hit(64)
    assert len(backend.asked) == 1 and len(backend.asked[0]) == 64 * len(SHARDS)


def test_equal_prompts_that_wait_together_ask_each_key_once(
    lookup: Lookups, backend: ScriptedStore, stats: PoolStats
) -> None:
    entered, gate = gated(backend)
    backend.keys = keys("p", 20)
    assert lookup.ask("first", blocks("q", 1)) is None
    assert entered.wait(WAIT_S)
    for number in range(8):
        assert lookup.ask(f"r{number}", blocks("p", 20)) is None
    assert lookup.waiting == 9
    gate.set()
    for number in range(8):
        assert lookup.ask(f"r{number}", blocks("p", 20), WAIT_S) == Hit(20)
    assert len(backend.asked) == 2 and len(backend.asked[1]) == 20 * len(SHARDS)
    assert stats.counts()["lookup_keys"] == 21 * len(SHARDS)


def test_a_long_prompt_that_misses_early_asks_no_further(
    lookup: Lookups, backend: ScriptedStore
) -> None:
    """Asking grants leases: what will not be loaded must not be pinned."""
    assert lookup.ask("r", blocks("p", 10_000), WAIT_S) == Hit(0, "p0@pp0r0")
    assert sum(len(batch) for batch in backend.asked) <= 512


def test_the_scheduler_is_never_held_longer_than_it_says(
    backend: ScriptedStore, stats: PoolStats, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    backend.gate = lambda: gate.wait(WAIT_S)
    lookup = Lookups(backend.exist, stats, deadline_s=0.3)
    started = time.monotonic()
    assert lookup.ask("r", blocks("p", 4)) is None
    assert time.monotonic() - started < 0.2
    hit = lookup.ask("r", blocks("p", 4), WAIT_S)
    assert 0.25 < time.monotonic() - started < 2.0
    assert hit == Hit(0, "the lookup's deadline passed")
    # Nobody else waits for that call.
    later = lookup.ask("r2", blocks("p", 4), WAIT_S)
    assert later is not None and later.blocks == 0 and "has not answered for" in str(later)
    assert stats.counts()["lookup_deadline_passed"] == 1
    assert len([r for r in caplog.records if "no answer for a lookup" in r.getMessage()]) == 1
    # The late answer changes nothing for them, and the next request is served.
    backend.keys = keys("p", 4)
    gate.set()
    assert lookup.ask("r", blocks("p", 4), WAIT_S) == hit
    lookup_until(lookup, "r3", Hit(4))
    lookup.close()


def lookup_until(lookup: Lookups, name: str, expected: Hit) -> None:
    """The thread may still be in its late call at first."""
    ends = time.monotonic() + WAIT_S
    while lookup.ask(name, blocks("p", 4), WAIT_S) != expected:
        assert time.monotonic() < ends
        lookup.forget(name)


def test_what_is_known_at_the_deadline_counts(backend: ScriptedStore, stats: PoolStats) -> None:
    backend.keys = keys("p", 300)
    gate = threading.Event()
    backend.gate = lambda: len(backend.asked) < 2 or gate.wait(WAIT_S)
    lookup = Lookups(backend.exist, stats, deadline_s=0.5, batch_keys=30)
    assert lookup.ask("r", blocks("p", 300), WAIT_S) == Hit(10, "the lookup's deadline passed")
    gate.set()
    lookup.close()


def test_a_broken_pool_is_a_miss_counted_and_logged_once(
    lookup: Lookups, backend: ScriptedStore, stats: PoolStats, caplog: pytest.LogCaptureFixture
) -> None:
    backend.down = "unavailable (code -900)"
    for number in range(10):
        hit = lookup.ask(f"r{number}", blocks("p", 3), WAIT_S)
        assert hit == Hit(0, "unavailable (code -900)")
    assert stats.counts()["lookup_failed"] == 10
    assert len([r for r in caplog.records if "-900" in r.getMessage()]) == 1
    backend.down = None
    backend.keys = keys("p", 3)
    assert lookup.ask("later", blocks("p", 3), WAIT_S) == Hit(3)


def test_a_request_asks_anew_when_forgotten_or_longer(
    lookup: Lookups, backend: ScriptedStore
) -> None:
    backend.keys = keys("p", 2)
    assert lookup.ask("r", blocks("p", 2), WAIT_S) == Hit(2)
    backend.keys = keys("p", 9)
    assert lookup.ask("r", blocks("p", 2), WAIT_S) == Hit(2)
    assert lookup.ask("r", blocks("p", 9), WAIT_S) == Hit(9)
    backend.keys = set()
    lookup.forget("r")
    lookup.forget("r")
    assert lookup.ask("r", blocks("p", 9), WAIT_S) == Hit(0, "p0@pp0r0")


def test_no_blocks_and_no_keys_never_hit(lookup: Lookups, backend: ScriptedStore) -> None:
    assert lookup.ask("empty", [], WAIT_S) == Hit(0)
    hit = lookup.ask("no shards", [(), ()], WAIT_S)
    assert hit is not None and hit.blocks == 0 and hit.shortened_by
    assert backend.asked == []


def test_close_answers_those_who_wait_and_all_who_come_later(
    backend: ScriptedStore, stats: PoolStats
) -> None:
    entered, gate = gated(backend)
    lookup = Lookups(backend.exist, stats, deadline_s=WAIT_S)
    assert lookup.ask("r", blocks("p", 1)) is None
    assert entered.wait(WAIT_S)
    closer = threading.Thread(target=lookup.close)
    closer.start()
    assert lookup.ask("r", blocks("p", 1), WAIT_S) == Hit(0, "closed")
    gate.set()
    closer.join(WAIT_S)
    assert lookup.ask("later", blocks("p", 1), WAIT_S) == Hit(0, "closed")
    lookup.close()


def test_a_refusal_by_the_breaker_is_an_answer_at_once(stats: PoolStats) -> None:
    def refuse(_: object) -> list[bool]:
        raise PoolUnavailable("the pool is left alone for now")

    lookup = Lookups(refuse, stats, deadline_s=WAIT_S)
    assert lookup.ask("r", blocks("p", 2), WAIT_S) == Hit(0, "the pool is left alone for now")
    lookup.close()


def test_a_hit_is_asked_for_anew_once_it_may_have_been_evicted(
    backend: ScriptedStore, stats: PoolStats
) -> None:
    """A request may wait for blocks for minutes; the store keeps what was found for seconds."""
    now = [100.0]
    opened = Lookups(backend.exist, stats, deadline_s=WAIT_S, clock=lambda: now[0])
    try:
        backend.keys = keys("a", 3)
        assert opened.ask("r", blocks("a", 3), WAIT_S) == Hit(3)
        backend.keys = set()
        now[0] += 1.9
        assert opened.ask("r", blocks("a", 3)) == Hit(3)
        now[0] += 0.2
        hit = opened.ask("r", blocks("a", 3), WAIT_S)
        assert hit is not None and hit.blocks == 0
        now[0] += 60
        assert opened.ask("r", blocks("a", 3)) == hit  # a miss stays one
    finally:
        opened.close()
