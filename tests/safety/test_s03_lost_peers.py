"""S3: a lost peer costs a bounded wait, its blocks come back, and what it says later is ignored.

Broadcasts: a rank of a real gloo group never joins, or is gone. Prefill and decode: real workers,
ports and Transfer Engines; the other side is gone, late, or says things again. Injected: dropped,
delayed, repeated and reordered messages, reads that are held past the lease. Field reports 2.1,
2.2, 2.3, 2.4, 2.6.
"""

from __future__ import annotations

import itertools
import time
from typing import Literal, get_args

import pytest

from kvpp_connectors.p2p.protocol import Confirm, Granted, Open, Release, Renew, Request, Valid
from kvpp_connectors.p2p.rpc import ask_once
from kvpp_connectors.p2p.transfer_params import read_params
from tests.core.gloo_world import GlooWorld
from tests.core.lost_peer import Lost, lost_peer
from tests.core.rig import PATIENCE, QUEUING, DeviceKind
from tests.p2p.conftest import Machine
from tests.p2p.pull_rig import LOCAL, REMOTE, TIMEOUT, rig
from tests.p2p.sides import eventually


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("guarded", [False, True], ids=["", "with loads"])
@pytest.mark.parametrize("kind", QUEUING)
def test_a_peer_that_never_joins_is_a_timeout_that_names_layer_and_owner(
    world2: GlooWorld, kind: DeviceKind, lost: int, guarded: bool
) -> None:
    """After it the pipeline refuses to go on: what hangs may still write the buffer."""
    seen = world2.run(lost_peer, kind, lost, leaves=False, guarded=guarded)[1 - lost]
    assert seen is not None
    for message in (seen.acquire, seen.abort) if seen.acquire else (seen.abort,):
        assert ("the load status of layer 0" if guarded else "the broadcast of layer 0") in message
        assert "from rank 0" in message
    assert bool(seen.acquire) == (kind == "cpu" or guarded)
    _assert_refuses(seen)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("kind", QUEUING)
def test_a_peer_that_is_gone_is_an_error_before_the_time_is_over(
    world2: GlooWorld, kind: DeviceKind, lost: int
) -> None:
    """On the CPU it names the layer; the simulated device shows torch's own error."""
    seen = world2.run(lost_peer, kind, lost, leaves=True, guarded=False)[1 - lost]
    assert seen is not None
    if kind == "cpu":
        assert "the broadcast of layer 0" in seen.acquire
        assert "from rank 0" in seen.acquire
    _assert_refuses(seen)


def _assert_refuses(seen: Lost) -> None:
    assert "broken" in seen.begin
    assert "broken" in seen.touch
    assert seen.seconds < PATIENCE


End = Literal["expired", "released", "read", "half read"]
PARTY = "decode/request"


def messages(transfer: str, generation: int) -> list[Request]:
    """All that a decode worker ever says of a lease."""
    key = transfer, generation, PARTY
    return [Open(*key, 2), Renew(*key), Confirm(*key, 0), Confirm(*key, 1), Release(*key, "late")]


@pytest.mark.parametrize("end", get_args(End))
@pytest.mark.parametrize("offered_again", [False, True], ids=["", "offered again"])
def test_what_a_lost_peer_says_after_its_lease_changes_nothing(
    machine: Machine, end: End, offered_again: bool
) -> None:
    """2.4: in any order, twice. Blocks came back once; those of a newer offer stay where they are.

    Reader 0 of two may have confirmed in time: it is told so again.
    """
    with rig(machine) as both:
        offer, scheduler = read_params(both.offer()), both.prefill.scheduler
        transfer, generation, _ = offer.lease(PARTY)

        def say(message: Request) -> object:
            return ask_once(offer.remote_host, offer.remote_port, None, 5.0, message)

        opened, _, first, second, release = messages(transfer, generation)
        confirmed = {"read": [first, second], "half read": [first]}.get(end, [])
        for message in [opened, *confirmed, *([release] if end == "released" else [])]:
            say(message)
        if end in ("expired", "half read"):
            with scheduler._lock:
                scheduler._book.expire(time.monotonic() + 2 * PATIENCE)
        assert both.prefill.let_go() == [transfer]
        if offered_again:
            both.prefill.offer(16, REMOTE[:1], transfer)
        for order in itertools.islice(itertools.permutations(messages(transfer, generation)), 8):
            for message in (*order[::-1], *order):
                answer = say(message)
                assert not isinstance(answer, Granted)
                valid = message in confirmed and not offered_again
                assert isinstance(answer, Valid) == valid, message
        assert scheduler._book.held == offered_again
        assert scheduler.pop_released() == []


def test_bytes_that_were_read_after_the_lease_had_expired_do_not_count(machine: Machine) -> None:
    """2.3: P reuses the blocks in mid-read; D has another request's bytes, and knows it."""
    with rig(machine, closed_at=2, lease=1.0) as both:
        both.pull_worker.submit(both.pull("a"))
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
        both.pull_worker.submit(pull)
        assert both.result().reason == "gone"
        assert both.local.difference() == []


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
        both.pull_worker.submit(pull)
        if gone == "lease in mid-read":
            assert both.gate.reached.wait(PATIENCE)
            both.prefill.scheduler.close()
            both.gate.open()
        result = both.result()
        assert result.reason == "unreachable"
        assert result.problem is not None and "did not answer" in result.problem
        assert time.monotonic() - started < 2 * TIMEOUT + 10.0


def test_reads_that_take_too_long_are_given_up(machine: Machine) -> None:
    """2.1: the bound is the option's, and its name is in the message."""
    with rig(machine, closed_at=1, pull_timeout=0.2) as both:
        both.pull_worker.submit(both.pull("a"))
        assert both.gate.reached.wait(PATIENCE)
        late = time.monotonic() + 0.2
        eventually(lambda: time.monotonic() > late)
        both.gate.open()
        result = both.result()
        assert result.reason == "read"
        assert result.problem == "the reads took more than pull_timeout_s = 0.2"
        assert both.prefill.let_go() == [result.pull.params.kvpp.transfer_id]
