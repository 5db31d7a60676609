"""Endpoints: bound before they are published, and every question answered or ended in its time.

Field reports 1.1 (endpoints that are calculated instead of bound), 2.1 (a peer that is silent).
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq

from kvpp_connectors.connector.facts import RankPosition
from kvpp_connectors.p2p.protocol import (
    Codec,
    Describe,
    Description,
    Granted,
    Refused,
    Release,
    Released,
    Renew,
    Reply,
    Request,
    Valid,
)
from kvpp_connectors.p2p.rpc import ControlClient, ControlServer, PeerUnreachable
from kvpp_core.errors import KvppError
from tests.p2p.conftest import Machine
from tests.p2p.sides import PATIENCE, Prefill, engine_facts, eventually, listening

HOST = "127.0.0.1"
TIMEOUT = 0.3  # seconds


@contextlib.contextmanager
def serving(
    handle: Callable[[Request], Reply] = lambda request: Released(),
    host: str = HOST,
    port: int = 0,
    key: bytes | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[ControlServer]:
    """A control server."""
    server = ControlServer(host, port, key, handle, what="worker 3", option="kv_port", tick=tick)
    with contextlib.closing(server):
        yield server


@contextlib.contextmanager
def asking(port: int, host: str = HOST, timeout: float = 5.0) -> Iterator[ControlClient]:
    """A control client."""
    with contextlib.closing(ControlClient(host, port, None, timeout)) as client:
        yield client


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """A port that a stranger listens on."""
    with socket.create_server((HOST, 0)) as stranger:
        yield stranger.getsockname()[1]


def caches(machine: Machine, number: int = 0) -> dict[str, torch.Tensor]:
    """A worker's only cache."""
    return {"layers.0.attn": machine.arenas[number][:256].view(4, 64)}


def free_range(count: int) -> int:
    """The first of ``count`` ports that are free in a row."""
    for first in range(37000, 60000, count):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server((HOST, port)))
            return first
    raise AssertionError("no free ports")


@pytest.mark.parametrize("host", [HOST, "localhost", "::1"])
def test_port_zero_publishes_what_was_bound(host: str) -> None:
    """1.1: and it answers there, by IPv6 too."""
    with serving(host=host) as one, serving(host=host) as two:
        assert one.port != two.port
        assert min(one.port, two.port) > 0
        for server in (one, two):
            with asking(server.port, host) as client:
                assert client.ask(Release("t", 1, "e", "r")) == Released()


def test_a_taken_port_is_an_error_that_says_whose_which_and_what_to_change() -> None:
    """1.1: and it leaves nothing behind."""
    threads = threading.active_count()
    with taken_port() as port, pytest.raises(KvppError) as error:
        ControlServer(HOST, port, None, lambda r: Released(), what="worker 3", option="kv_port")
    assert str(error.value).startswith(f"worker 3 cannot listen on {HOST}:{port}: Address already")
    assert "Give kv_port another value" in str(error.value)
    assert threading.active_count() == threads


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1", "not an address"])
def test_an_address_of_another_host_is_an_error(host: str) -> None:
    """1.1: a wrong host setting is found at the start."""
    with pytest.raises(KvppError, match="cannot listen on"):
        ControlServer(host, 0, None, lambda r: Released(), what="worker 3", option="host")


def test_a_worker_on_a_taken_port_names_its_ranks_the_port_and_the_option(machine: Machine) -> None:
    """1.1: P exits naming rank, port and option."""
    with taken_port() as port:
        facts = engine_facts("prefill", kv_port=port - 3, pp=2, tp=2)
        with contextlib.closing(Prefill(facts)) as prefill, pytest.raises(KvppError) as error:
            prefill.add_worker(
                RankPosition(pp=1, tp=1, tp_size=2), caches(machine), machine.prefill[0]
            )
    for word in (f"{HOST}:{port}", "pp 1 pcp 0 tp 1", facts.engine_id, "kv_transfer_config.kv_port",
                 f"now {port - 3}", "0 takes free ports"):  # fmt: skip
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("dp", "pp", "pcp", "tp"), list(itertools.product((1, 2), repeat=4)), ids=str
)
def test_workers_of_an_instance_share_no_port(dp: int, pp: int, pcp: int, tp: int) -> None:
    """1.1: every dp, pp, pcp and tp in {1, 2}: consecutive ports from kv_port on."""
    ports = instance_ports(37000, dp, pp, pcp, tp)
    assert sorted(ports) == list(range(37000, 37000 + dp * pp * pcp * tp))
    other = instance_ports(37010, dp, pp, pcp, tp)
    assert bool(set(ports) & set(other)) == (len(ports) > 10)
    assert set(instance_ports(0, dp, pp, pcp, tp)) == {0}


def instance_ports(kv_port: int, dp: int, pp: int, pcp: int, tp: int) -> list[int]:
    """Where all workers of an instance answer."""
    return [
        engine_facts("prefill", kv_port=kv_port, dp_rank=rank, pp=pp, pcp=pcp, tp=tp)
        .handshake_port(RankPosition(*ranks, pcp, tp))
        for rank in range(dp)
        for ranks in itertools.product(range(pp), range(pcp), range(tp))
    ]  # fmt: skip


def test_two_instances_that_overlap_are_detected_and_with_port_zero_they_do_not(
    machine: Machine,
) -> None:
    """1.1: the second instance does not start on the first one's ports."""
    first = free_range(4)
    ranks = [RankPosition(tp=tp, tp_size=2) for tp in range(2)]

    def start(stack: contextlib.ExitStack, kv_port: int) -> set[int]:
        prefill = Prefill(engine_facts("prefill", kv_port=kv_port, tp=2))
        stack.enter_context(contextlib.closing(prefill))
        for number, rank in enumerate(ranks):
            prefill.add_worker(rank, caches(machine, number), machine.prefill[number])
        workers = prefill.offer(16, [0])["kvpp"]["workers"]
        return {worker["port"] for worker in workers}

    with contextlib.ExitStack() as stack:
        assert start(stack, first) == {first, first + 1}
        with pytest.raises(KvppError, match=rf"tp 0 .* {HOST}:{first + 1}"):
            start(stack, first + 1)
        assert not start(stack, 0) & {first, first + 1}
        assert start(stack, first + 2) == {first + 2, first + 3}


@pytest.mark.parametrize("peer", ["nobody", "silent", "answers something else", "answers garbage"])
def test_who_gets_no_answer_is_told_within_the_bound(peer: str) -> None:
    """2.1: the error names the peer and the question."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    port = router.bind_to_random_port(f"tcp://{HOST}")
    if peer == "nobody":
        router.close()
    stop = threading.Event()

    def answer() -> None:
        while not stop.is_set():
            if router.poll(10):
                name, _ = router.recv_multipart()
                other = Codec(None).reply(Valid(), b"another nonce 16")
                router.send_multipart([name, b"?" if peer == "answers garbage" else other])

    thread = threading.Thread(target=answer, daemon=True)
    if peer.startswith("answers"):
        thread.start()
    started = time.monotonic()
    with asking(port, timeout=TIMEOUT) as client, pytest.raises(PeerUnreachable) as error:
        client.ask(Describe(), attempts=2)
    took = time.monotonic() - started
    assert str(error.value).startswith(f"{HOST}:{port} did not answer describe: ")
    assert took < 2 * TIMEOUT + 10.0
    if not peer.startswith("answers"):
        assert took >= 2 * TIMEOUT
        assert f"no answer within {TIMEOUT:g} s" in str(error.value)
    stop.set()
    if peer.startswith("answers"):
        thread.join(PATIENCE)
    context.destroy(0)


def test_a_second_attempt_finds_a_peer_that_has_come_up() -> None:
    """2.7: the first message was lost; the question is asked again on a new connection."""
    with taken_port() as silent:
        pass
    asked = []

    def handle(request: Request) -> Reply:
        asked.append(request)
        return Granted(1.0)

    with asking(silent, timeout=PATIENCE / 2) as client:
        answers: list[Reply] = []
        thread = threading.Thread(
            target=lambda: answers.append(client.ask(Renew("t", 1, "e"))), daemon=True
        )
        thread.start()
        with serving(handle, port=silent):
            thread.join(PATIENCE)
    assert answers == [Granted(1.0)]
    assert Renew("t", 1, "e") in asked


@pytest.mark.parametrize(
    "host", ["bad host", "a\nb", "a\0b", "*", "", "\ud800", "tcp://x", "/etc", "x" * 500, "::::"]
)
def test_an_address_that_is_none_is_a_peer_that_cannot_be_reached(host: str) -> None:
    """2.1: addresses come with a request; a foolish one must not end the thread that asks."""
    with asking(1, host, timeout=0.05) as client, pytest.raises(PeerUnreachable):
        client.ask(Describe())


def test_late_answers_of_an_earlier_question_are_not_taken_for_the_next() -> None:
    """2.4: a slow peer answers the first question while the second is asked."""
    slow = threading.Event()

    def handle(request: Request) -> Reply:
        assert isinstance(request, Renew)
        if request.generation == 1:
            slow.wait(PATIENCE)
        return Granted(float(request.generation))

    with serving(handle) as server, asking(server.port, timeout=TIMEOUT) as client:
        with pytest.raises(PeerUnreachable):
            client.ask(Renew("t", 1, "e"), attempts=1)
        slow.set()
        answer = eventually(lambda: _answer(client, Renew("t", 2, "e")))
        assert answer == Granted(2.0)


def _answer(client: ControlClient, request: Request) -> Reply | None:
    with contextlib.suppress(PeerUnreachable):
        return client.ask(request)
    return None


def test_a_stopped_server_has_freed_its_port_and_its_thread() -> None:
    """1.1: the same port can be bound at once, and who asks in between is told."""
    with serving() as server:
        port = server.port
        assert server.alive
    eventually(lambda: not server.alive)
    with asking(port, timeout=TIMEOUT) as client, pytest.raises(PeerUnreachable):
        client.ask(Describe(), attempts=1)
    with serving(port=port) as again, asking(port) as client:
        assert again.port == port
        assert client.ask(Describe()) == Released()


def test_the_clock_ticks_without_traffic_and_under_a_flood() -> None:
    """2.6: expiry does not wait for a message, and no message holds it up for ever."""
    ticks = []
    with serving(tick=lambda: ticks.append(time.monotonic())) as server:
        eventually(lambda: len(ticks) >= 3)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{HOST}:{server.port}")
        before = len(ticks)
        deadline = time.monotonic() + PATIENCE
        while len(ticks) < before + 3:
            dealer.send(b"nonsense")
            assert time.monotonic() < deadline
        dealer.close(0)


def test_lease_and_worker_endpoints_answer_only_what_is_theirs(machine: Machine) -> None:
    """1.1: two endpoints that are mistaken for one another say so."""
    with contextlib.closing(Prefill(engine_facts("prefill"))) as prefill, listening() as lines:
        prefill.add_worker(RankPosition(), caches(machine), machine.prefill[0])
        params = prefill.offer(16, [0])
        [worker] = params["kvpp"]["workers"]
        with asking(worker["port"]) as client:
            assert isinstance(client.ask(Describe()), Description)
            said = client.ask(_renewal(params))
            assert isinstance(said, Refused) and "remote_host:remote_port" in said.reason
        with asking(params["remote_port"]) as client:
            said = client.ask(Describe())
            assert isinstance(said, Refused) and "kv_port" in said.reason
            renew = _renewal(params)
            assert isinstance(client.ask(renew), Granted)
    assert lines == []


def _renewal(params: dict[str, Any]) -> Renew:
    details = params["kvpp"]
    return Renew(details["transfer_id"], details["generation"], "a decode request")
