"""The real memcache_hybrid: its MetaService and a scheduler's client. No NPU is needed for these.

Field reports 4.4 (a store that goes, hangs and comes back), 6.2 (lookups must not hold the
scheduler), 7.3 (codes in words).

An empty pool is all that there can be here: a worker's client, which alone can save and so make a
hit, needs an NPU. Hits are tested on the stand-in (test_conformance.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvpp_connectors.pool.keys import MAX_KEY
from kvpp_connectors.pool.store.base import PoolUnavailable, StoreResult
from kvpp_connectors.pool.store.memcache import new_client
from tests.pool.master import wait_until
from tests.pool.metaservice import Client, MetaService

pytestmark = pytest.mark.process

BOUND_S = 30.0  # of what takes some seconds on an idle machine
KEYS = ["kvpp1@a", "kvpp1@b"]
BLOCKS = [[key] for key in KEYS]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetaService]:
    """One for all: a machine runs no second one."""
    started = MetaService(tmp_path_factory.mktemp("memcache"))
    yield started
    started.close()


@pytest.fixture
def meta(service: MetaService) -> Iterator[MetaService]:
    """For one test, which may kill or stop it."""
    service.start()
    yield service
    service.resume()


@pytest.fixture
def client(meta: MetaService) -> Iterator[Client]:
    """A scheduler's, connected."""
    opened = Client(meta.config)
    assert opened.do("connect") is None
    yield opened
    opened.kill()


@pytest.fixture
def guarded(meta: MetaService) -> Iterator[Client]:
    """A scheduler's with breaker and lookups, as in the connector; its deadline is 0.5 s."""
    opened = Client(meta.config)
    opened.do("guard", 0.5)
    assert opened.do("ready", BOUND_S)
    yield opened
    opened.kill()


def test_lookups_in_an_empty_pool_are_misses(client: Client) -> None:
    assert client.do("exist", KEYS) == [False, False]
    many = [f"kvpp1@{i:0200d}" for i in range(5_000)]
    assert client.do("exist", many) == [False] * 5_000
    assert client.do("sizes", KEYS) == [0, 0]


def test_two_schedulers_and_several_threads_look_up_at_once(
    meta: MetaService, client: Client
) -> None:
    other = Client(meta.config)
    try:
        assert other.do("connect") is None
        assert client.do("exist_in_threads", 4, 50) == 200
        assert other.do("exist", KEYS) == [False, False]
        assert other.end() == 0, "it closes and ends without a crash"
    finally:
        other.kill()
    assert client.do("exist", KEYS) == [False, False], "the other's end is not ours"


@pytest.mark.parametrize(
    ("method", "arguments", "codes", "result"),
    [
        ("batch_add_lease", [KEYS, 1000], [-3102, -3102], StoreResult.MISSING),
        ("batch_remove_lease", [KEYS], -3106, StoreResult.LEASE_EXPIRED),
        ("batch_remove_lease", [KEYS[:1]], -3106, StoreResult.LEASE_EXPIRED),
        ("batch_write_finish", [KEYS, [0, 0]], [-3000, -3000], StoreResult.FAILED),
        ("remove", [KEYS[0]], -3102, StoreResult.MISSING),
        ("remove_batch", [KEYS], [-3102, -3102], StoreResult.MISSING),
        ("batch_is_exist", [["", ""]], [-3000, -3000], StoreResult.FAILED),
    ],
)
def test_the_codes_of_the_real_service_are_those_that_the_backend_explains(
    client: Client, method: str, arguments: list[Any], codes: Any, result: StoreResult
) -> None:
    assert client.do("raw", method, *arguments) == codes
    code = codes if isinstance(codes, int) else codes[0]
    found, words = client.do("outcome", code)
    assert found == result and "does not explain" not in words


def test_space_in_a_pool_to_which_nobody_lends_memory_is_refused(client: Client) -> None:
    assert client.do("raw", "batch_alloc", KEYS, [4096, 4096]) == [0, 0]
    assert client.do("exist", KEYS) == [False, False]


def test_the_longest_key_is_256_characters_and_ours_are_shorter(client: Client) -> None:
    assert MAX_KEY < 256
    assert client.do("raw", "batch_is_exist", ["k" * 256]) == [0]
    assert client.do("raw", "batch_is_exist", ["k" * 257]) == [-3000]


def test_a_workers_client_without_an_npu_says_what_it_needs(meta: MetaService) -> None:
    worker = Client(meta.config, "worker")
    try:
        assert "needs an NPU" in worker.do("connect")["unavailable"]
    finally:
        worker.kill()


def test_a_closed_client_is_unavailable_and_no_crash(meta: MetaService) -> None:
    closed = Client(meta.config)
    try:
        closed.do("connect")
        closed.do("close")
        assert "closed" in closed.do("exist", KEYS)["unavailable"]
        assert closed.end() == 0
    finally:
        closed.kill()


def test_a_killed_metaservice_is_left_alone_and_a_restarted_one_is_used_again(
    meta: MetaService, guarded: Client
) -> None:
    assert guarded.do("ask", "before", BLOCKS, BOUND_S)[:2] == [0, KEYS[0]]
    meta.kill()
    for request in ("dead 1", "dead 2"):
        blocks, why, _ = guarded.do("ask", request, BLOCKS, BOUND_S)
        assert blocks == 0 and "code -3014" in why
    state, reason = guarded.do("state")
    assert state != "CLOSED" and "the link to MemCache's MetaService is broken" in reason
    blocks, why, _ = guarded.do("ask", "left alone", BLOCKS, BOUND_S)
    assert blocks == 0 and "left alone for now" in why
    meta.start()
    assert guarded.do("ready", BOUND_S), guarded.do("state")
    assert guarded.do("ask", "after", BLOCKS, BOUND_S)[:2] == [0, KEYS[0]]
    assert guarded.do("clients") == 1, "the store's client finds its way back by itself"


def test_a_stuck_metaservice_holds_no_step_and_comes_back(
    meta: MetaService, guarded: Client
) -> None:
    """A call into it takes 60 s, whatever ock.mmc.client.timeout.seconds says."""
    meta.stop()
    blocks, why, first_s = guarded.do("ask", "stuck", BLOCKS, BOUND_S)
    assert blocks == 0 and "deadline passed" in why
    blocks, why, next_s = guarded.do("ask", "next", BLOCKS, BOUND_S)
    assert blocks == 0 and "has not answered for" in why
    assert first_s < 20 and next_s < 20, "far below the 60 s of the call"
    meta.resume()

    def answers() -> bool:
        blocks, why, _ = guarded.do("ask", f"{len(asked)}", BLOCKS, BOUND_S)
        asked.append(why)
        return (blocks, why) == (0, KEYS[0])

    asked: list[str] = []
    wait_until(answers, BOUND_S, "a lookup's answer")
    assert guarded.do("state")[0] == "CLOSED"


def test_without_a_metaservice_the_client_starts_and_the_pool_comes_later(
    meta: MetaService,
) -> None:
    meta.kill()
    early = Client(meta.config)
    try:
        early.do("guard", 0.5)
        assert not early.do("ready", 0.1)
        wait_until(lambda: "code" in early.do("state")[1], BOUND_S, "a try to connect")
        assert "is its MetaService running at" in early.do("state")[1]
        blocks, why, _ = early.do("ask", "early", BLOCKS, BOUND_S)
        assert blocks == 0 and "left alone for now" in why
        meta.start()
        assert early.do("ready", BOUND_S), early.do("state")
        assert early.do("ask", "late", BLOCKS, BOUND_S)[:2] == [0, KEYS[0]]
    finally:
        early.kill()


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "memcache_hybrid", None)
    with pytest.raises(PoolUnavailable, match="pip install memcache-hybrid"):
        new_client()
