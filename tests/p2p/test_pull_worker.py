"""The decode worker's pulls against a real prefill side: control ports, lease, Transfer Engine.

Field reports 1.2 (a peer with another key), 2.1 (a failed pull has a way back), 2.7 (a peer that
was restarted), 8.2 (an offer that is used twice). Every pull yields exactly one result; aborts,
lost peers and reads that write late are in tests/safety (S1 to S3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpp_connectors.p2p import prefill_peers, pull_worker
from kvpp_connectors.p2p.protocol import Description, Region
from kvpp_connectors.p2p.read_plan import choose_sources
from tests.p2p.conftest import Machine
from tests.p2p.pull_rig import REMOTE, WORKER, rig
from tests.p2p.sides import PATIENCE, Prefill, engine_facts


def test_a_pull_brings_every_block_and_ends_the_lease(machine: Machine) -> None:
    """And says how many bytes it brought."""
    with rig(machine) as both:
        result = both.now("a")
        assert (result.problem, result.reason) == (None, "ok")
        per_block = sum(row.block_bytes for row in both.local.rows.values())
        assert result.bytes == len(REMOTE) * per_block
        both.assert_pulled()
        assert both.prefill.let_go() == [result.pull.params.kvpp.transfer_id]


def test_two_requests_with_one_offer_do_not_read_beside_each_other(machine: Machine) -> None:
    """8.2: the first one's confirmation lets the blocks go; the second must not count on them."""
    with rig(machine, closed_at=0) as both:
        params = both.offer()
        both.pull_worker.submit(both.pull("first", params))
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
    dead: Any = SimpleNamespace(session="127.0.0.1:1", register=lambda address, size: None)
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

    monkeypatch.setattr(prefill_peers, "choose_sources", counted)
    with rig(machine) as both:
        assert [both.now(name).reason for name in "abc"] == ["ok"] * 3
        assert len(met) == 1
        params = both.offer()
        params["kvpp"]["generation"] += 1
        assert both.now("d", params).reason == "gone"
        assert both.now("e").reason == "ok"
        assert len(met) == 2


def test_another_key_is_a_peer_that_cannot_be_used(machine: Machine) -> None:
    """1.2: the reason is in the message."""
    with rig(machine, key=b"a key that P does not have") as both:
        result = both.now("a")
        assert result.reason == "unreachable"
        assert result.problem is not None and "not signed with this side's key" in result.problem


@pytest.mark.parametrize(
    ("module", "place"),
    [
        (prefill_peers, "choose_sources"),
        (pull_worker, "plan_reads"),
        (pull_worker, "read_all"),
    ],
    ids=["choose_sources", "plan_reads", "read_all"],
)
def test_a_fault_of_this_package_has_a_result_too(
    module: ModuleType, place: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.1: a pull without a result would hold its request for ever."""

    def broken(*words: object) -> None:
        raise ZeroDivisionError

    with rig(machine) as both:
        with monkeypatch.context() as patch:
            patch.setattr(module, place, broken)
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
