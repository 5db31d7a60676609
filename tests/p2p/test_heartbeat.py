"""Renewals and releases reach their leases beside everything else, and never hold up a caller.

Field reports 2.2 (an explicit release), 2.3 (a decode engine that keeps renewing is not expired),
2.7 (one dead peer must not cost the others their leases).
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvpp_connectors.p2p.heartbeat import Heartbeat
from kvpp_connectors.p2p.protocol import (
    Gone,
    Granted,
    Release,
    Released,
    Renew,
    Reply,
    Request,
    WorkerAddress,
    party_of,
)
from kvpp_connectors.p2p.rpc import ControlServer
from kvpp_connectors.p2p.transfer_params import TransferLease, TransferParams
from tests.p2p.sides import PATIENCE, eventually, listening

HOST = "127.0.0.1"
TIMEOUT = 0.5  # seconds


class LeaseEndpoint:
    """Answers renewals with a term, and notes down what it hears."""

    def __init__(self, answer: Reply | None = None) -> None:
        self.heard: list[Any] = []
        self._answer = answer or Granted(0.3)
        self.server = ControlServer(HOST, 0, None, self._handle, what="lease", option="none")

    def _handle(self, request: Request) -> Reply:
        self.heard.append(request)
        return Released() if isinstance(request, Release) else self._answer

    def offer(self, name: str) -> TransferParams:
        """An offer whose lease is kept here."""
        return offer(name, HOST, self.server.port)

    def count(self, kind: type[Renew] | type[Release], name: str) -> int:
        """Messages of a kind for a transfer."""
        return sum(isinstance(m, kind) and m.transfer_id == name for m in list(self.heard))

    def close(self) -> None:
        """Stop."""
        self.server.close()


def offer(name: str, host: str, port: int) -> TransferParams:
    """An offer whose lease is kept at an address."""
    details = TransferLease(1, name, 1, [WorkerAddress(HOST, 1, "e")])
    return TransferParams("P", host, port, [[0]], 16, 16, details)


@pytest.fixture
def endpoint() -> Iterator[LeaseEndpoint]:
    """One that grants 0.3 s."""
    with contextlib.closing(LeaseEndpoint()) as endpoint:
        yield endpoint


@pytest.fixture
def heartbeat(endpoint: LeaseEndpoint) -> Iterator[Heartbeat]:
    """One, which is closed before the endpoint."""
    with contextlib.closing(Heartbeat("D", None, TIMEOUT)) as heartbeat:
        yield heartbeat


@contextlib.contextmanager
def silent_peer() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server((HOST, 0), backlog=1000) as server:
        yield server.getsockname()[1]


def test_a_lease_is_renewed_until_it_is_released(
    heartbeat: Heartbeat, endpoint: LeaseEndpoint
) -> None:
    """2.3, 2.2: as often as its term needs; the release comes once, and after it nothing."""
    heartbeat.add("request", endpoint.offer("t"))
    eventually(lambda: endpoint.count(Renew, "t") >= 3)
    for _ in range(3):
        heartbeat.release("request", "aborted")
    eventually(lambda: endpoint.count(Release, "t"))
    heartbeat.add("other", endpoint.offer("u"))
    eventually(lambda: endpoint.count(Renew, "u") >= 2)
    assert endpoint.heard[-1].transfer_id == "u"
    assert endpoint.count(Release, "t") == 1
    last = next(m for m in reversed(endpoint.heard) if m.transfer_id == "t")
    assert last == Release("t", 1, party_of("D", "request"), "aborted")


def test_a_lease_that_is_over_is_not_renewed(heartbeat: Heartbeat, endpoint: LeaseEndpoint) -> None:
    """2.4: because decode says so, or because the lease endpoint does."""
    with contextlib.closing(LeaseEndpoint(Gone("read"))) as over:
        heartbeat.add("over", over.offer("over"))
        heartbeat.add("done", endpoint.offer("done"))
        heartbeat.remove("done")
        heartbeat.add("alive", endpoint.offer("alive"))
        eventually(lambda: endpoint.count(Renew, "alive") >= 5)
        assert over.count(Renew, "over") == 1
    assert endpoint.count(Renew, "done") == 0
    heartbeat.release("over", "too late")
    heartbeat.remove("nobody")


@pytest.mark.parametrize("first_end", ["release", "remove"])
def test_a_transfer_of_two_requests_is_released_with_the_last(
    first_end: str, heartbeat: Heartbeat, endpoint: LeaseEndpoint
) -> None:
    """8.2: a client sent one offer twice; the end of one request is not the other's."""
    for name in ("one", "other"):
        heartbeat.add(name, endpoint.offer("t"))
    heartbeat.add("one", endpoint.offer("t"))  # again: it counts once
    heartbeat.add("third", endpoint.offer("u"))
    getattr(heartbeat, first_end)("one", *["aborted"] * (first_end == "release"))
    heartbeat.release("one", "aborted")
    heartbeat.release("third", "aborted")
    eventually(lambda: endpoint.count(Release, "u"))  # messages are sent in order
    assert endpoint.count(Release, "t") == 0
    heartbeat.release("other", "aborted")
    eventually(lambda: endpoint.count(Release, "t"))


def test_the_caller_never_waits(heartbeat: Heartbeat) -> None:
    """2.1: a dead peer does not hold up the scheduler."""
    with silent_peer() as port:
        started = time.monotonic()
        for number in range(1000):
            heartbeat.add(f"r{number}", offer(f"t{number}", HOST, port))
            heartbeat.release(f"r{number}", "aborted")
        assert time.monotonic() - started < 10.0  # waiting would take 500 s
        eventually(lambda: heartbeat.not_reached >= 1000)


def test_a_dead_peer_does_not_cost_the_others_their_leases(
    heartbeat: Heartbeat, endpoint: LeaseEndpoint
) -> None:
    """2.7: one wait a round for it, not one for each of its leases and releases."""
    with silent_peer() as port, listening() as lines:
        for number in range(200):  # one after another they would take 100 s
            heartbeat.add(f"dead-{number}", offer(f"dead-{number}", HOST, port))
        for number in range(200):
            heartbeat.add(f"left-{number}", offer(f"left-{number}", HOST, port))
            heartbeat.release(f"left-{number}", "aborted")
        heartbeat.add("alive", endpoint.offer("alive"))
        started = time.monotonic()
        eventually(lambda: endpoint.count(Renew, "alive") >= 3)
        assert time.monotonic() - started < PATIENCE
        heartbeat.release("alive", "done")
        eventually(lambda: endpoint.count(Release, "alive"))
    assert heartbeat.not_reached >= 200
    assert any("did not answer" in line for line in lines)


def test_a_renewal_that_was_lost_is_sent_again() -> None:
    """2.3: the peer was away for a moment, and the lease has most of its term left."""
    heard: list[Request] = []

    def handle(request: Request) -> Reply:
        heard.append(request)
        return Granted(60.0)

    with contextlib.closing(Heartbeat("D", None, TIMEOUT)) as heartbeat:
        with silent_peer() as port:
            heartbeat.add("request", offer("t", HOST, port))
            eventually(lambda: heartbeat.not_reached)
        back = ControlServer(HOST, port, None, handle, what="lease", option="none")
        with contextlib.closing(back):
            eventually(lambda: heard)
    assert heard == [Renew("t", 1, party_of("D", "request"))]


@pytest.mark.parametrize(
    "host", ["bad host", "a\0b", "*", "tcp://x", "/etc", "no.such.host.invalid"]
)
def test_a_foolish_address_does_not_end_the_courier(
    host: str, heartbeat: Heartbeat, endpoint: LeaseEndpoint
) -> None:
    """8.2: the address is a client's word; other requests are renewed and released as before."""
    heartbeat.add("foolish", offer("foolish", host, 1))
    heartbeat.add("gone", offer("gone", host, 1))
    heartbeat.release("gone", "aborted")
    heartbeat.add("good", endpoint.offer("good"))
    eventually(lambda: endpoint.count(Renew, "good") >= 2)
    heartbeat.release("good", "done")
    eventually(lambda: endpoint.count(Release, "good"))
    assert heartbeat.not_reached >= 1


def test_closing_sends_what_was_released(endpoint: LeaseEndpoint) -> None:
    """2.2: an engine that is shut down in an orderly way leaves no blocks held."""
    heartbeat = Heartbeat("D", None, TIMEOUT)
    for number in range(50):
        heartbeat.add(f"r{number}", endpoint.offer(f"t{number}"))
        heartbeat.release(f"r{number}", "shutdown")
    heartbeat.close()
    assert sum(endpoint.count(Release, f"t{number}") for number in range(50)) == 50


def test_leases_beyond_the_limit_rely_on_their_first_term(
    heartbeat: Heartbeat, endpoint: LeaseEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.2: memory is bounded."""
    monkeypatch.setattr("kvpp_connectors.p2p.heartbeat._MOST", 1)
    heartbeat.add("first", endpoint.offer("first"))
    heartbeat.add("second", endpoint.offer("second"))
    eventually(lambda: endpoint.count(Renew, "first") >= 2)
    assert endpoint.count(Renew, "second") == 0
    heartbeat.release("second", "unknown here")
