"""A store that is gone is left alone, and found again by one loop.

Field report 4.4: a store that goes and comes back.
"""

from __future__ import annotations

import threading

import pytest

from kvpp_connectors.pool.stats import PoolStats
from kvpp_connectors.pool.store.base import Buffer, PoolUnavailable, StoreOutcome, StoreResult
from kvpp_connectors.pool.store.circuit_breaker import Breaker, BreakerState
from kvpp_connectors.pool.store.resilient import ResilientStore
from tests.pool.scripted import ScriptedStore

WAIT_S = 20.0
BUFFER = Buffer((1,), (10,))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def closed_breaker(clock: Clock) -> Breaker:
    breaker = Breaker(opens_after=3, pause_s=1.0, longest_pause_s=4.0, clock=clock)
    assert breaker.state is BreakerState.OPEN
    assert breaker.wait_for_probe(lambda: False)  # at once
    breaker.probe_ended(answered=True)
    assert breaker.closed
    return breaker


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker = closed_breaker(Clock())
    assert [breaker.failed(), breaker.failed()] == [False, False]
    breaker.succeeded()
    assert [breaker.failed(), breaker.failed(), breaker.failed()] == [False, False, True]
    assert breaker.state is BreakerState.OPEN


def test_late_failures_of_an_open_breaker_change_nothing() -> None:
    clock = Clock()
    breaker = closed_breaker(clock)
    for _ in range(3):
        breaker.failed()
    assert not breaker.failed()
    clock.now += 1.0
    assert breaker.wait_for_probe(lambda: False)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.failed()
    breaker.succeeded()
    assert breaker.state is BreakerState.HALF_OPEN, "the probe alone decides"


def test_the_pause_doubles_up_to_its_bound_and_starts_anew() -> None:
    clock = Clock()
    breaker = closed_breaker(clock)
    for _ in range(3):
        breaker.failed()
    pauses = []
    for _ in range(4):
        before = clock.now
        while not probe_is_due(breaker):
            clock.now += 0.5
        pauses.append(clock.now - before)
        breaker.probe_ended(answered=False)
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    clock.now += 4.0
    assert breaker.wait_for_probe(lambda: False)
    breaker.probe_ended(answered=True)
    for _ in range(3):
        breaker.failed()
    clock.now += 1.0
    assert probe_is_due(breaker)


def probe_is_due(breaker: Breaker) -> bool:
    looks = iter([False, True])  # stop at the second look: no sleeping by a clock that stands
    breaker_wait = threading.Timer(0.05, breaker.wake)
    breaker_wait.start()
    due = breaker.wait_for_probe(lambda: next(looks, True))
    breaker_wait.cancel()
    return due


def guarded(backend: ScriptedStore, stats: PoolStats | None = None) -> ResilientStore:
    return ResilientStore(backend, stats or PoolStats("pool rank 0/1"), 3, 0.01, 0.05)


def test_nobody_waits_for_a_store_that_is_gone_and_one_loop_finds_it_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend, stats = ScriptedStore(["a"]), PoolStats("pool rank 0/1")
    guard = guarded(backend, stats)
    assert guard.wait_ready(WAIT_S)
    assert guard.exist(["a", "b"]) == [True, False]
    backend.down = "master does not answer"
    for _ in range(3):
        with pytest.raises(PoolUnavailable, match="master does not answer"):
            guard.exist(["a"])
    calls = len(backend.asked)
    with pytest.raises(PoolUnavailable, match="left alone for now: master does not answer"):
        guard.exist(["a"])
    (put,) = guard.put(["a"], [BUFFER])
    (get,) = guard.get(["a"], [BUFFER])
    assert put.result is get.result is StoreResult.UNAVAILABLE
    assert len(backend.asked) == calls, "the store was asked in spite of the breaker"
    backend.down = None
    assert guard.wait_ready(WAIT_S)
    assert guard.exist(["a"]) == [True]
    counts = stats.counts()
    assert counts["breaker_opened"] == 1 and counts["breaker_closed"] == 2
    assert counts["breaker_refused"] == 3 and counts["put_unavailable"] == 1
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len([line for line in warnings if "left alone" in line]) == 1
    guard.close()
    assert backend.closed


def test_failed_moves_open_the_breaker_and_misses_do_not() -> None:
    backend = ScriptedStore()
    guard = guarded(backend)
    assert guard.wait_ready(WAIT_S)
    for result in (
        StoreResult.MISSING,
        StoreResult.NO_SPACE,
        StoreResult.FAILED,
        StoreResult.WRONG_LENGTH,
    ):
        backend.outcome = StoreOutcome(result, -1, "so it is")
        for _ in range(5):
            assert guard.get(["a"], [BUFFER])[0].result is result
        assert guard.state is BreakerState.CLOSED
    backend.down = "gone"
    for _ in range(3):
        guard.put(["a"], [BUFFER])
    assert guard.state is not BreakerState.CLOSED and guard.reason.endswith("gone")
    guard.close()


def test_close_ends_the_loop_while_the_store_is_gone() -> None:
    backend = ScriptedStore()
    backend.down = "never there"
    guard = guarded(backend)
    assert not guard.wait_ready(0.05)
    guard.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "kvpp-pool-connect" not in names


def test_each_kind_of_trouble_is_counted_and_logged_once_and_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Field report 7.3: a thousand failing keys must not drown the log."""
    stats = PoolStats("pool rank 3")
    keys = [f"kvpp1@{'x' * 150}@{i}" for i in range(1000)]
    for _ in range(20):
        stats.record(
            "get", keys, [StoreOutcome(StoreResult.MISSING, -704, "evicted " * 1000)] * 1000
        )
        stats.record("put", keys, [StoreOutcome(StoreResult.NO_SPACE, -200, "full")] * 1000)
        stats.record("put", keys, [StoreOutcome(StoreResult.STORED)] * 1000)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all(len(line) < 2000 and "pool rank 3" in line for line in lines)
    assert "1000 of 1000 objects: missing (code -704)" in lines[0]
    assert keys[0] in lines[1] and "no space (code -200): full" in lines[1]
    counts = stats.drain()
    assert counts == {"get_missing": 20_000, "put_no_space": 20_000, "put_stored": 20_000}
    assert stats.drain() == {}
    stats.recovered()
    stats.record("put", keys[:1], [StoreOutcome(StoreResult.NO_SPACE, -200, "full")])
    assert len(caplog.records) == 3, "after a recovery it is news again"
