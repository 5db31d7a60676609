"""S2: every abort gets exactly one answer per requester, after the drain.

In the scheduler: vLLM frees a request at the first answer and dies at the second, so each request
of each kind of engine is freed once, whenever its client leaves, how its transfers end and however
often the abort is told. At decode: a pull that is aborted at any moment has one result, when its
reads have ended, and lets go of its lease; real workers, ports and Transfer Engines. Injected:
held transfers, repeated aborts. Field reports 2.1, 2.2, 2.4, 2.9.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from kvpp_connectors.p2p.messages import Pull
from kvpp_connectors.p2p.protocol import Confirm, Open, Reply, Request
from kvpp_connectors.p2p.rpc import ControlClient
from tests.p2p.conftest import Machine
from tests.p2p.pull_rig import LOCAL, held_reads, rig
from tests.p2p.sides import PATIENCE
from tests.safety.site import Kind, Launch, Site
from tests.safety.workers import BLOCK, Ending

KINDS = {
    "pool": Kind(pool=True),
    "pool, between steps": Kind(pool=True, load_async=True),
    "prefill": Kind("kv_producer"),
    "decode": Kind("kv_consumer"),
    "prefill and pool": Kind("kv_producer", pool=True, load_async=True),
    "pool and decode": Kind("kv_consumer", pool=True, pool_first=True, load_async=True),
}
PROMPT = [*range(4 * BLOCK), 7, 7]
ALL = frozenset(range(64))
ENDS = {"well": Ending(good=ALL), "badly": Ending(bad=ALL)}


@pytest.fixture(scope="module", params=KINDS)
def launch(request: pytest.FixtureRequest, mla_model: Path) -> Launch:
    """Each kind of engine."""
    return Launch(mla_model, KINDS[request.param])


@pytest.fixture
def site(launch: Launch) -> Iterator[Site]:
    """With room for four requests."""
    site = Site(launch, 26)
    yield site
    site.close()


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("pooled", [0, 2])
@pytest.mark.parametrize("steps", range(5))
def test_an_aborted_request_is_freed_once_whenever_its_client_leaves(
    site: Site, steps: int, pooled: int, how: str
) -> None:
    """While it waits, loads, is pulled, computes, saves, or is on offer; told twice."""
    if site.kind.pool:
        site.save(PROMPT, pooled)
    for name in ("r", "other"):
        site.arrive(name, PROMPT, 4, remote=True)
    for step in range(steps):
        site.step(Ending(good=ALL if step % 2 else frozenset(), still_read=True))
    for _ in range(2):
        if "r" not in site.finished or site.finished["r"] == "abort":
            site.abort("r")
    for _ in range(2):
        site.step(Ending(still_read=True))
    assert site.freed["r"] <= 1
    for _ in range(4):
        site.step(ENDS[how])
    site.drain()  # compares how often each request was freed with once
    assert site.workers.reports["r"] <= 1 and "other" in site.finished


class HeldAnswers:
    """The answer to one kind of message is held back on its way to decode."""

    def __init__(self, kind: type[Request]) -> None:
        self._kind, self._ask = kind, ControlClient.ask
        self.reached, self.opened = threading.Event(), threading.Event()

    def ask(self, client: ControlClient, request: Request, attempts: int = 2) -> Reply:
        """As the client does it."""
        reply = self._ask(client, request, attempts)
        if isinstance(request, self._kind):
            self.reached.set()
            assert self.opened.wait(PATIENCE)
        return reply


@pytest.mark.parametrize(
    ("message", "reason"), [(Open, "cancelled"), (Confirm, "ok")], ids=["opens", "confirms"]
)
def test_a_pull_that_is_aborted_while_it_asks_has_one_result(
    machine: Machine, message: type[Request], reason: str
) -> None:
    """What is confirmed already counts; nothing is read after an abort before the first read."""
    held = HeldAnswers(message)
    with (
        mock.patch.object(ControlClient, "ask", lambda *a, **k: held.ask(*a, **k)),
        rig(machine) as both,
    ):
        both.pull_worker.submit(both.pull("a"))
        assert held.reached.wait(PATIENCE)
        for _ in range(3):
            both.pull_worker.cancel("a")
        assert both.pull_worker.take_results() == []
        held.opened.set()
        result = both.result()
        assert result.reason == reason
        assert both.prefill.let_go() == [result.pull.params.kvpp.transfer_id]
        if reason == "cancelled":
            assert both.local.difference() == []


@pytest.mark.parametrize("held", [1, 3])
def test_an_abort_is_answered_after_the_last_read_that_can_still_write(
    machine: Machine, held: int
) -> None:
    """2.1: reads that were submitted cannot be called back."""
    with held_reads(machine, held, None, window=held) as (both, reads):
        both.pull_worker.submit(both.pull("a"))
        assert reads.all_held.wait(PATIENCE)
        both.pull_worker.cancel("a")
        reads.let_go_one_by_one(lambda: both.pull_worker.take_results() == [])
        assert both.result().reason == "cancelled"
        both.assert_blocks_may_be_given_away()


def test_a_cancelled_pull_ends_early_and_releases_the_lease(machine: Machine) -> None:
    """2.2: P frees at once, and D gets its result when what was submitted has ended."""
    with rig(machine, closed_at=3) as both:
        both.pull_worker.submit(both.pull("a"))
        assert both.gate.reached.wait(PATIENCE)
        for _ in range(2):
            both.pull_worker.cancel("a")
        assert both.pull_worker.take_results() == []
        both.gate.open()
        result = both.result()
        assert (result.reason, result.problem) == ("cancelled", "the request was aborted")
        assert both.prefill.let_go() == [result.pull.params.kvpp.transfer_id]
        both.pull_worker.cancel("a")
        assert both.now("a").reason == "ok"  # the name is not cancelled for ever
        both.pull_worker.cancel("nobody")


def test_a_pull_that_waits_for_a_thread_can_be_cancelled(machine: Machine) -> None:
    """2.2: it reads nothing, and has its result."""
    with rig(machine, closed_at=0, threads=1) as both:
        both.pull_worker.submit(both.pull("a"))
        assert both.gate.reached.wait(PATIENCE)
        both.pull_worker.submit(both.pull("b"))
        both.pull_worker.cancel("b")
        both.gate.open()
        results = both.results(2)
        assert {r.pull.request_id: r.reason for r in results} == {"a": "ok", "b": "cancelled"}


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
                pull = Pull(name, pull.params, (0, 1, 2, 10), LOCAL)
            kinds[name] = kind
            both.pull_worker.submit(pull)
            if kind == "cancelled":
                both.pull_worker.cancel(name)
        results = both.results(60)
        assert sorted(r.pull.request_id for r in results) == sorted(kinds)
        expected = {"good": "ok", "released": "gone", "unknown": "gone", "outside": "incompatible"}
        for result in results:
            kind = kinds[result.pull.request_id]
            assert result.reason == expected.get(kind, result.reason), result
            assert kind != "cancelled" or result.reason in ("ok", "cancelled")
