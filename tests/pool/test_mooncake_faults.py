"""Mooncake for real: what happens when its master, a peer or its memory fails.

Field reports 4.1 (found at lookup, gone at load), 4.2 (failed reads), 4.3 (full pool), 4.4 (master
and members that go and come back).
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpp_connectors.connector.transfer_engine import TransferEngine
from kvpp_connectors.pool.stats import PoolStats
from kvpp_connectors.pool.store.base import PoolUnavailable, StoreResult
from kvpp_connectors.pool.store.circuit_breaker import BreakerState
from kvpp_connectors.pool.store.mooncake import MooncakeStore
from kvpp_connectors.pool.store.mooncake_settings import MooncakeSettings
from kvpp_connectors.pool.store.resilient import ResilientStore
from tests.pool.master import Master, wait_until
from tests.pool.memory import Memory, bytes_of
from tests.pool.stores import SEGMENT, MooncakeUnderTest
from tests.signals import signal_group

pytestmark = pytest.mark.process

MIB = 1 << 20
BOUND_S = 20.0  # of what takes about 2 s on an idle machine


@pytest.fixture
def store(master: Master) -> Iterator[MooncakeUnderTest]:
    opened = MooncakeUnderTest(master, packed=True)
    yield opened
    opened.close()


def put(
    store: MooncakeUnderTest | MooncakeStore | ResilientStore, key: str, size: int
) -> StoreResult:
    backend = store.backend if isinstance(store, MooncakeUnderTest) else store
    memory = Memory.holding(bytes_of(key, size), 1)  # lives until the put has read it
    return backend.put([key], [memory.buffer])[0].result


def get(store: MooncakeUnderTest | ResilientStore, key: str, size: int) -> StoreResult:
    backend = store.backend if isinstance(store, MooncakeUnderTest) else store
    memory = Memory([size])
    result = backend.get([key], [memory.buffer])[0].result
    if result is StoreResult.LOADED:
        assert memory.data == bytes_of(key, size)
    return result


def test_a_put_that_lied_is_found_out(store: MooncakeUnderTest) -> None:
    """Another client's unfinished put swallows ours, and Mooncake says 0."""
    assert store.raw.batch_put_session_start(["kvpp1@open"], [1000]) == [0]
    assert put(store, "kvpp1@open", 1000) is StoreResult.NOT_KEPT
    assert get(store, "kvpp1@open", 1000) is StoreResult.MISSING
    assert store.raw.batch_put_session_revoke(["kvpp1@open"]) == [0]
    assert put(store, "kvpp1@open", 1000) is StoreResult.STORED


def test_without_verification_the_lie_is_believed(master: Master) -> None:
    """What the test above would see if puts were not verified."""
    store = MooncakeUnderTest(master, packed=True, verify_puts=False)
    assert store.raw.batch_put_session_start(["kvpp1@open"], [1000]) == [0]
    assert put(store, "kvpp1@open", 1000) is StoreResult.STORED
    store.close()


def test_a_full_pool_refuses_evicts_and_takes_again(store: MooncakeUnderTest) -> None:
    """48 MiB into 16 MiB, leases of 200 ms. No result but stored or no space."""
    keys = [f"kvpp1@{i}" for i in range(48)]
    results = [put(store, key, MIB) for key in keys]
    assert set(results) <= {StoreResult.STORED, StoreResult.NO_SPACE, StoreResult.NOT_KEPT}
    assert results[:12] == [StoreResult.STORED] * 12
    there = store.backend.exist(keys)
    assert sum(there) * MIB <= SEGMENT
    for key, found in zip(keys, there, strict=True):
        expected = (StoreResult.LOADED, StoreResult.MISSING) if found else (StoreResult.MISSING,)
        assert get(store, key, MIB) in expected
    # After the leases new objects are taken in, for old ones.
    wait_until(
        lambda: put(store, f"kvpp1@{time.monotonic()}", MIB) is StoreResult.STORED,
        BOUND_S,
        "a save",
    )


def test_no_space_is_tried_again_and_then_told(master: Master) -> None:
    """All 16 MiB under a lease of 200 ms that we renew: no pause of ours ends that."""
    store = MooncakeUnderTest(master, packed=True, no_space_waits_ms=(1, 1))
    keys = [f"kvpp1@{i}" for i in range(20)]
    results = []
    for key in keys:
        store.backend.exist(keys)
        results.append(put(store, key, MIB))
    assert StoreResult.NO_SPACE in results
    store.close()


def test_after_its_lease_an_object_may_be_gone_and_is_a_miss(store: MooncakeUnderTest) -> None:
    assert put(store, "kvpp1@old", MIB) is StoreResult.STORED
    assert store.backend.exist(["kvpp1@old"]) == [True]

    def evicted() -> bool:
        for i in range(16):
            put(store, f"kvpp1@{time.monotonic()}-{i}", MIB)
        return not store.raw.get_replica_desc("kvpp1@old")

    wait_until(evicted, BOUND_S, "an eviction")
    assert get(store, "kvpp1@old", MIB) is StoreResult.MISSING


def test_a_killed_master_is_unavailable_and_a_restarted_one_is_used_again(
    master: Master, store: MooncakeUnderTest
) -> None:
    guarded = ResilientStore(store.backend, PoolStats("test"), opens_after=2, pause_s=0.1)
    assert guarded.wait_ready(BOUND_S)
    assert put(guarded, "kvpp1@before", 1000) is StoreResult.STORED
    master.kill()
    for _ in range(2):
        assert get(guarded, "kvpp1@before", 1000) is StoreResult.UNAVAILABLE
    assert guarded.state is not BreakerState.CLOSED
    started = time.monotonic()
    with pytest.raises(PoolUnavailable, match="left alone for now"):
        guarded.exist(["kvpp1@before"])
    assert put(guarded, "kvpp1@x", 1000) is StoreResult.UNAVAILABLE
    assert time.monotonic() - started < 1.0, "an open breaker must not wait for the store"

    master.start()
    assert guarded.wait_ready(BOUND_S), guarded.reason
    assert guarded.exist(["kvpp1@before"]) == [False]  # a master that starts is empty
    wait_until(lambda: put(guarded, "kvpp1@after", 1000).endswith("stored"), BOUND_S, "a save")
    assert get(guarded, "kvpp1@after", 1000) is StoreResult.LOADED
    guarded.close()


def test_a_stopped_master_costs_bounded_time_and_comes_back(
    master: Master, store: MooncakeUnderTest
) -> None:
    guarded = ResilientStore(store.backend, PoolStats("test"), opens_after=1, pause_s=0.1)
    assert guarded.wait_ready(BOUND_S)
    assert put(guarded, "kvpp1@kept", 1000) is StoreResult.STORED
    master.signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(PoolUnavailable, match="did not answer in time"):
        # The answer to a first call may have been on its way already.
        for _ in range(5):
            guarded.exist(["kvpp1@kept"])
    assert time.monotonic() - started < 15.0  # Mooncake's default is 30 s
    master.signal(signal.SIGCONT)
    assert guarded.wait_ready(BOUND_S), guarded.reason
    assert get(guarded, "kvpp1@kept", 1000) is StoreResult.LOADED
    guarded.close()


def test_without_a_master_the_engine_starts_and_the_pool_comes_later(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    master.kill()
    backend = MooncakeStore(
        MooncakeSettings(master_server_address=master.address), "127.0.0.1", "tcp", SEGMENT
    )
    guarded = ResilientStore(backend, PoolStats("pool rank 0/1"), pause_s=0.05)
    assert not guarded.wait_ready(0.5)
    lines = [r.getMessage() for r in caplog.records if "mooncake_master" in r.getMessage()]
    assert len(lines) == 1, "logged once"
    assert master.address in lines[0] and "Start one" in lines[0] and "rank 0/1" in lines[0]
    master.start()
    assert guarded.wait_ready(BOUND_S), guarded.reason
    assert put(guarded, "kvpp1@late", 1000) is StoreResult.STORED
    guarded.close()


_OWNER = """
import os, sys
from tests.pool.memory import Memory, bytes_of
from tests.pool.stores import MooncakeUnderTest
class Found:
    address = sys.argv[1]
store = MooncakeUnderTest(Found, packed=True)
memory = Memory.holding(bytes_of("kvpp1@theirs", 70_000), 1)
outcomes = store.backend.put(["kvpp1@theirs"], [memory.buffer])
print([outcome.result.value for outcome in outcomes], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_an_object_whose_owner_is_lost_fails_in_bounded_time(
    master: Master, fault: signal.Signals
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, master.address],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "['stored']\n"
        store = MooncakeUnderTest(master, packed=True)
        loaded = lambda: get(store, "kvpp1@theirs", 70_000) is StoreResult.LOADED  # noqa: E731
        wait_until(loaded, BOUND_S, "a load from the owner, in spite of its short lease")
        signal_group(owner.pid, fault)
        started = time.monotonic()
        result = get(store, "kvpp1@theirs", 70_000)
        assert result in (StoreResult.FAILED, StoreResult.MISSING), result
        assert time.monotonic() - started < 25.0  # Mooncake's default is 30 s, twice with our retry
        # Until the master's client_ttl (10 s) is over, new objects may be given to the lost member.
        names = (f"kvpp1@ours{i}" for i in itertools.count())
        kept = next(n for n in names if put(store, n, 1000) is StoreResult.STORED or late(started))
        assert get(store, kept, 1000) is StoreResult.LOADED
        store.close()
    finally:
        owner.kill()
        owner.communicate(timeout=30)


def late(started: float) -> bool:
    assert time.monotonic() - started < 60.0, "no save was kept"
    return False


def test_a_store_may_share_the_process_transfer_engine(master: Master) -> None:
    engine = TransferEngine("127.0.0.1", "tcp")
    settings = MooncakeSettings(master_server_address=master.address)
    backend = MooncakeStore(settings, "127.0.0.1", "tcp", SEGMENT, engine)
    backend.connect()
    assert put(backend, "kvpp1@shared", 1000) is StoreResult.STORED
    backend.close()
    assert engine.start_read is not None and engine.session.startswith("127.0.0.1:")


def test_clear_takes_one_namespace_and_no_other(store: MooncakeUnderTest) -> None:
    """Field report 4.7: a reset must not wipe what others have."""
    for key in ("kvpp1@ours@a", "kvpp1@ours@b", "kvpp1@theirs@a"):
        assert put(store, key, 1000) is StoreResult.STORED
    assert isinstance(store.backend, MooncakeStore)
    backend, removed = store.backend, 0

    def cleared() -> bool:  # as the leases end
        nonlocal removed
        removed += backend.clear("kvpp1@ours@")
        return removed == 2

    wait_until(cleared, BOUND_S, "the namespace's end")
    assert store.raw.batch_is_exist(["kvpp1@ours@a", "kvpp1@theirs@a"]) == [0, 1]
