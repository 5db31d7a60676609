"""The decode worker's pulls against a real prefill side: control ports, lease, Transfer Engine.

Field reports 2.1 (a failed pull has a way back), 2.2 (the lease is released), 2.3 (the lease ends
under the reader's hands), 2.7 (a peer that was restarted), 8.2 (an offer that is used twice).
Every pull yields exactly one result, and only when nothing writes to its blocks any more.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvpp_connectors.p2p import puller as puller_module
from kvpp_connectors.p2p.caches import cache_regions
from kvpp_connectors.p2p.offer import read_offer
from kvpp_connectors.p2p.plan import choose_sources
from kvpp_connectors.p2p.puller import Pull, Puller, PullerSettings, PullResult
from kvpp_connectors.p2p.reads import ReadEngine
from kvpp_connectors.p2p.wire import Description, Region
from kvpp_connectors.p2p.worker import Ranks
from kvpp_connectors.transport import Read, TransferEngine
from kvpp_core.layout import Placement
from tests.core.rank_memory import ALIGNED, UNALIGNED, uneven_model
from tests.p2p.conftest import Machine
from tests.p2p.kv_memory import laid_out
from tests.p2p.sides import BLOCK_SIZE, PATIENCE, Prefill, engine_facts, eventually

BUNDLES, DRAFTS = uneven_model(2)[:2]
PLACEMENT = Placement(BUNDLES, (0, 0), 1, 0, DRAFTS)
TOKENS = 4 * BLOCK_SIZE
REMOTE, LOCAL = (1, 3, 5, 7), (8, 2, 9, 4)  # scattered: a read for each block and component
TIMEOUT = 0.5  # seconds, of one control message
WORKER = Ranks(0, 0, 0)


class Gate:
    """A real engine whose n-th read (from 0) waits until the gate is opened."""

    def __init__(self, engine: ReadEngine, closed_at: int | None) -> None:
        self._engine, self._closed_at = engine, closed_at
        self._numbers = itertools.count()
        self.reached, self._opened = threading.Event(), threading.Event()

    def open(self) -> None:
        """Let the read through."""
        self._opened.set()

    def start_read(self, read: Read) -> int | None:
        """Submit it, when the gate is open."""
        if next(self._numbers) == self._closed_at:
            self.reached.set()
            assert self._opened.wait(PATIENCE)
        return self._engine.start_read(read)

    def poll(self, handle: int) -> bool | None:
        """As the engine."""
        return self._engine.poll(handle)


class Rig:
    """A prefill engine with one worker, and a puller of one decode worker."""

    def __init__(self, machine: Machine, closed_at: int | None, lease: float, **changes: Any):
        self.machine = machine
        self.remote = laid_out(PLACEMENT, 10, ALIGNED, interleaved=False)
        self.remote.use(machine.arenas[0])
        self.remote.overwrite(range(10), writer=0, generation=1)
        self.local = laid_out(PLACEMENT, 10, UNALIGNED, interleaved=False)
        self.local.use(machine.decode_arenas[0])
        options = {"lease_seconds": lease}
        self.prefill = Prefill(engine_facts("prefill", options=options))
        self.add_worker(machine.prefill[0])
        self.gate = Gate(machine.decode, closed_at)
        regions = cache_regions({name: self.local.of(name) for name in self.local.rows})
        facts = self.prefill.facts
        self.own = Description(
            "decode", "none", facts.model, facts.block_size, facts.kv_cache_dtype, regions
        )
        settings: dict[str, Any] = {
            "engine_id": "D", "reader": 0, "readers": 1, "key": None, "window": 4, "threads": 4,
            "control_timeout": TIMEOUT, "pull_timeout": PATIENCE,
        }  # fmt: skip
        self.puller = Puller(self.own, self.gate, PullerSettings(**(settings | changes)))

    def add_worker(self, engine: TransferEngine) -> None:
        """Start the prefill worker, or start it anew with another epoch."""
        caches = {name: self.remote.of(name) for name in self.remote.rows}
        self.prefill.add_worker(WORKER, caches, engine)

    def pull(self, name: str, params: dict[str, Any] | None = None) -> Pull:
        """A pull of a prefilled request, by default of a new one."""
        return Pull(name, read_offer(params or self.offer()), REMOTE, LOCAL)

    def offer(self) -> dict[str, Any]:
        """A request that was prefilled into REMOTE."""
        return self.prefill.offer(TOKENS, REMOTE)

    def result(self) -> PullResult:
        """The next result, which is the only one."""
        [result] = eventually(self.puller.take_results)
        assert isinstance(result, PullResult)
        return result

    def results(self, count: int) -> list[PullResult]:
        """The next results, as soon as there are ``count``."""
        results: list[PullResult] = []

        def enough() -> bool:
            results.extend(self.puller.take_results())
            return len(results) >= count

        eventually(enough)
        return results

    def now(self, name: str, params: dict[str, Any] | None = None) -> PullResult:
        """A pull from its start to its result."""
        self.puller.submit(self.pull(name, params))
        return self.result()

    def assert_pulled(self, generation: int = 1) -> None:
        """The blocks hold the request's KV, and nothing else was touched."""
        for name in self.local.rows:
            self.local.expect(name, LOCAL, REMOTE, [0], generation)
        assert self.local.difference() == []

    def close(self) -> None:
        """Stop everything."""
        self.gate.open()
        self.puller.close()
        self.prefill.close()


@contextlib.contextmanager
def rig(
    machine: Machine, closed_at: int | None = None, lease: float = PATIENCE, **changes: Any
) -> Iterator[Rig]:
    """Both sides; nothing is in flight in the end, and no result is left over."""
    made = Rig(machine, closed_at, lease, **changes)
    with contextlib.closing(made):
        yield made
        assert made.puller.take_results() == []
        assert made.puller.in_flight == 0


def test_a_pull_brings_every_block_and_ends_the_lease(machine: Machine) -> None:
    """And says how many bytes it brought."""
    with rig(machine) as both:
        result = both.now("a")
        assert (result.problem, result.reason) == (None, "ok")
        per_block = sum(row.block_bytes for row in both.local.rows.values())
        assert result.bytes == len(REMOTE) * per_block
        both.assert_pulled()
        assert both.prefill.let_go() == [result.pull.offer.kvpp.transfer_id]


def test_bytes_that_were_read_after_the_lease_had_expired_do_not_count(machine: Machine) -> None:
    """2.3: P reuses the blocks in mid-read; D has another request's bytes, and knows it."""
    with rig(machine, closed_at=2, lease=1.0) as both:
        both.puller.submit(both.pull("a"))
        assert both.gate.reached.wait(PATIENCE)
        both.prefill.let_go()
        both.remote.overwrite(REMOTE, writer=0, generation=2)
        both.gate.open()
        result = both.result()
        assert result.reason == "gone"
        assert result.problem is not None and result.problem.endswith("is over: expired")
        last = list(both.local.rows)[-1]
        both.local.expect(last, LOCAL, REMOTE, [0], generation=2)  # the wrong bytes are there


def test_a_pull_that_begins_after_the_lease_had_expired_reads_nothing(machine: Machine) -> None:
    """2.3: decode was held up; not one byte is read from blocks that are another request's."""
    with rig(machine, lease=0.2) as both:
        pull = both.pull("a")
        both.prefill.let_go()
        both.puller.submit(pull)
        assert both.result().reason == "gone"
        assert both.local.difference() == []


def test_two_requests_with_one_offer_do_not_read_beside_each_other(machine: Machine) -> None:
    """8.2: the first one's confirmation lets the blocks go; the second must not count on them."""
    with rig(machine, closed_at=0) as both:
        params = both.offer()
        both.puller.submit(both.pull("first", params))
        assert both.gate.reached.wait(PATIENCE)
        second = both.now("second", params)
        assert second.reason == "gone"
        assert second.problem is not None and "another decode request reads it" in second.problem
        both.gate.open()
        assert both.result().reason == "ok"
        both.assert_pulled()
        assert both.now("third", params).reason == "gone"


def test_a_worker_that_was_restarted_is_noticed_and_met_again(machine: Machine) -> None:
    """2.7: same port, other epoch: one request fails, the next one works."""
    with contextlib.closing(Prefill(engine_facts("prefill"))) as other:
        other.add_worker(WORKER, {"x": machine.arenas[0][:64].view(4, 16)}, machine.prefill[0])
        with rig(machine) as both:
            params = both.offer()
            [worker] = params["kvpp"]["workers"]
            worker["port"] = other.offer(16, [0])["kvpp"]["workers"][0]["port"]
            result = both.now("a", params)
            assert result.reason == "restarted"
            assert both.local.difference() == []
            assert both.prefill.let_go() == [params["kvpp"]["transfer_id"]]
            assert both.now("b").reason == "ok"
            both.assert_pulled()


def test_a_worker_that_died_is_met_anew_at_its_new_place(machine: Machine) -> None:
    """2.7: its requests fail, at once; those of its replacement work, from the new addresses."""
    dead: Any = SimpleNamespace(session="127.0.0.1:1", register=lambda storage: None)
    with rig(machine) as both:
        assert both.now("a").reason == "ok"
        both.add_worker(dead)
        assert both.now("b").reason == "read"
        both.local.reset()
        both.remote.overwrite(range(10), writer=0, generation=2)
        both.add_worker(machine.prefill[0])
        assert both.now("c").reason == "ok"
        both.assert_pulled(generation=2)


def test_a_worker_is_described_once_for_many_requests(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.7: what is cached is used while it is right, and asked for again after a failure."""
    met: list[int] = []

    def counted(
        own: Description, workers: Sequence[Description], spread: int
    ) -> dict[str, tuple[str, Region]]:
        met.append(1)
        return choose_sources(own, workers, spread)

    monkeypatch.setattr(puller_module, "choose_sources", counted)
    with rig(machine) as both:
        assert [both.now(name).reason for name in "abc"] == ["ok"] * 3
        assert len(met) == 1
        params = both.offer()
        params["kvpp"]["generation"] += 1
        assert both.now("d", params).reason == "gone"
        assert both.now("e").reason == "ok"
        assert len(met) == 2


@pytest.mark.parametrize("gone", ["lease before", "lease in mid-read", "worker"])
def test_an_endpoint_that_is_gone_is_told_within_the_bound(gone: str, machine: Machine) -> None:
    """2.1: two attempts of half a second each, for one endpoint after the other."""
    with rig(machine, closed_at=1) as both:
        pull = both.pull("a")
        if gone == "worker":
            both.prefill._workers[0].close()
        elif gone == "lease before":
            both.prefill.scheduler.close()
        started = time.monotonic()
        both.puller.submit(pull)
        if gone == "lease in mid-read":
            assert both.gate.reached.wait(PATIENCE)
            both.prefill.scheduler.close()
            both.gate.open()
        result = both.result()
        assert result.reason == "unreachable"
        assert result.problem is not None and "did not answer" in result.problem
        assert time.monotonic() - started < 2 * TIMEOUT + 10.0


def test_another_key_is_a_peer_that_cannot_be_used(machine: Machine) -> None:
    """1.2: the reason is in the message."""
    with rig(machine, key=b"a key that P does not have") as both:
        result = both.now("a")
        assert result.reason == "unreachable"
        assert result.problem is not None and "not signed with this side's key" in result.problem


def test_a_cancelled_pull_ends_early_and_releases_the_lease(machine: Machine) -> None:
    """2.2: P frees at once, and D gets its result when what was submitted has ended."""
    with rig(machine, closed_at=3) as both:
        both.puller.submit(both.pull("a"))
        assert both.gate.reached.wait(PATIENCE)
        for _ in range(2):
            both.puller.cancel("a")
        assert both.puller.take_results() == []
        both.gate.open()
        result = both.result()
        assert (result.reason, result.problem) == ("cancelled", "the request was aborted")
        assert both.prefill.let_go() == [result.pull.offer.kvpp.transfer_id]
        both.puller.cancel("a")
        assert both.now("a").reason == "ok"  # the name is not cancelled for ever
        both.puller.cancel("nobody")


def test_a_pull_that_waits_for_a_thread_can_be_cancelled(machine: Machine) -> None:
    """2.2: it reads nothing, and has its result."""
    with rig(machine, closed_at=0, threads=1) as both:
        both.puller.submit(both.pull("a"))
        assert both.gate.reached.wait(PATIENCE)
        both.puller.submit(both.pull("b"))
        both.puller.cancel("b")
        both.gate.open()
        results = both.results(2)
        assert {r.pull.request_id: r.reason for r in results} == {"a": "ok", "b": "cancelled"}


def test_reads_that_take_too_long_are_given_up(machine: Machine) -> None:
    """2.1: the bound is the option's, and its name is in the message."""
    with rig(machine, closed_at=1, pull_timeout=0.2) as both:
        both.puller.submit(both.pull("a"))
        assert both.gate.reached.wait(PATIENCE)
        late = time.monotonic() + 0.2
        eventually(lambda: time.monotonic() > late)
        both.gate.open()
        result = both.result()
        assert result.reason == "read"
        assert result.problem == "the reads took more than pull_timeout_s = 0.2"
        assert both.prefill.let_go() == [result.pull.offer.kvpp.transfer_id]


@pytest.mark.parametrize("place", ["choose_sources", "plan_reads", "read_all"])
def test_a_fault_of_this_package_has_a_result_too(
    place: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.1: a pull without a result would hold its request for ever."""

    def broken(*words: object) -> None:
        raise ZeroDivisionError

    with rig(machine) as both:
        with monkeypatch.context() as patch:
            patch.setattr(puller_module, place, broken)
            result = both.now("a")
        assert (result.reason, result.problem) == (
            "internal",
            "a fault of this package; see the log",
        )
        assert both.now("b").reason == "ok"


@pytest.mark.parametrize("host", ["bad host", "a\0b", "*", "tcp://x"])
def test_a_foolish_address_has_a_result_too(host: str, machine: Machine) -> None:
    """2.1: for the lease's address and for a worker's."""
    with rig(machine) as both:
        assert both.now("a", both.offer() | {"remote_host": host}).reason == "unreachable"
        params = both.offer()
        params["kvpp"]["workers"][0]["host"] = host
        assert both.now("b", params).reason == "unreachable"
        assert both.now("c").reason == "ok"


def test_every_pull_has_exactly_one_result(machine: Machine) -> None:
    """2.1, 2.4: good, expired, foreign and cancelled pulls beside each other."""
    chance = random.Random(7)
    with rig(machine) as both:
        kinds: dict[str, str] = {}
        for number in range(60):
            kind = chance.choice(["good", "released", "unknown", "outside", "cancelled"])
            name, params = f"{kind}-{number}", both.offer()
            pull, details = both.pull(name, params), params["kvpp"]
            if kind == "released":
                both.prefill.scheduler._book.release(
                    details["transfer_id"], details["generation"], "t", "test", time.monotonic()
                )
            elif kind == "unknown":
                pull = both.pull(name, params | {"kvpp": details | {"transfer_id": "nobody"}})
            elif kind == "outside":
                pull = Pull(name, pull.offer, (0, 1, 2, 10), LOCAL)
            kinds[name] = kind
            both.puller.submit(pull)
            if kind == "cancelled":
                both.puller.cancel(name)
        results = both.results(60)
        assert sorted(r.pull.request_id for r in results) == sorted(kinds)
        expected = {"good": "ok", "released": "gone", "unknown": "gone", "outside": "incompatible"}
        for result in results:
            kind = kinds[result.pull.request_id]
            assert result.reason == expected.get(kind, result.reason), result
            assert kind != "cancelled" or result.reason in ("ok", "cancelled")


def test_closing_ends_what_runs_and_what_waits(machine: Machine) -> None:
    """S1: nothing writes to local memory afterwards."""
    with rig(machine, closed_at=2, threads=1) as both:
        for name in "abc":
            both.puller.submit(both.pull(name))
        assert both.gate.reached.wait(PATIENCE)
        closing = threading.Thread(target=both.puller.close, daemon=True)
        closing.start()
        eventually(lambda: both.puller._cancelled >= {"a", "b", "c"})
        both.gate.open()
        closing.join(PATIENCE)
        assert not closing.is_alive()
        assert [result.reason for result in both.puller.take_results()] == ["cancelled"]
        both.puller._running.clear()  # what had not begun is not reported: the engine ends
