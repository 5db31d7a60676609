"""Keeps the leases of requests that wait at decode alive, on a thread of its own.

The scheduler never waits for a peer. While a request waits for its turn, its lease is renewed; when
it is clear that nobody will read, the lease is released at once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass

from kvpp_connectors.connector.threads import start_thread
from kvpp_connectors.log import get_logger
from kvpp_connectors.p2p.protocol import Granted, Release, Renew, Reply, Request, party_of
from kvpp_connectors.p2p.rpc import PeerUnreachable, ask_once
from kvpp_connectors.p2p.transfer_params import TransferParams

__all__ = ["Heartbeat"]

logger = get_logger(__name__)

_FIRST = 1.0  # seconds to the first renewal, which tells how long leases run here
_MOST = 65536  # leases that are kept alive; beyond that a request relies on its first term


_Transfer = tuple[str, int, str, int]


@dataclass(slots=True)
class _Waiting:
    params: TransferParams
    party: str
    due: float

    @property
    def transfer(self) -> _Transfer:
        """The lease that several requests may have been given by mistake."""
        params, details = self.params, self.params.kvpp
        return params.remote_host, params.remote_port, details.transfer_id, details.generation

    @property
    def lease(self) -> tuple[str, int, str]:
        """How a message names it."""
        return self.params.lease(self.party)


class Heartbeat:
    """Renews leases while their requests wait, and releases them. All methods return at once."""

    def __init__(self, engine_id: str, key: bytes | None, timeout: float) -> None:
        self._engine_id, self._key, self._timeout = engine_id, key, timeout
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._interested: Counter[_Transfer] = Counter()  # requests that wait, per transfer
        self._releases: queue.SimpleQueue[tuple[_Waiting, str] | None] = queue.SimpleQueue()
        self.not_reached = 0
        self._thread = start_thread(
            "kvpp heartbeat",
            self._run,
            "the leases of requests that wait here run out at prefill; restart the engine",
        )

    def add(self, request_id: str, params: TransferParams) -> None:
        """Renew the lease until `release` or `remove`."""
        self.remove(request_id)
        with self._lock:
            if len(self._waiting) < _MOST:
                party = party_of(self._engine_id, request_id)
                waiting = _Waiting(params, party, time.monotonic() + _FIRST)
                self._waiting[request_id] = waiting
                self._interested[waiting.transfer] += 1

    def release(self, request_id: str, reason: str) -> None:
        """Tell the lease that nobody is going to read, unless another request still may."""
        waiting, others = self._drop(request_id)
        if waiting is not None and not others:
            self._releases.put((waiting, reason))

    def remove(self, request_id: str) -> None:
        """The lease is over without us."""
        self._drop(request_id)

    def close(self) -> None:
        """Stop; releases that were asked for are still sent."""
        self._releases.put(None)
        self._thread.join(2 * self._timeout)

    def _drop(self, request_id: str) -> tuple[_Waiting | None, int]:
        """The request, if its lease was kept alive, and how many others have the same transfer."""
        with self._lock:
            waiting = self._waiting.pop(request_id, None)
            if waiting is None:
                return None, 0
            self._interested[waiting.transfer] -= 1
            others = self._interested[waiting.transfer]
            if not others:
                del self._interested[waiting.transfer]
            return waiting, others

    def _run(self) -> None:
        jobs: list[tuple[_Waiting, str] | None] = []
        while None not in jobs:
            jobs = self._take_releases()
            # A dead peer costs one wait a round, however many leases it had: the others' leases
            # have to be renewed meanwhile.
            silent: set[tuple[str, int]] = set()
            for waiting, reason in filter(None, jobs):
                self._send(waiting.params, Release(*waiting.lease, reason), silent)
            if None not in jobs:
                self._renew_due(silent)

    def _take_releases(self) -> list[tuple[_Waiting, str] | None]:
        """All that wait; up to 0.2 s for the first."""
        jobs: list[tuple[_Waiting, str] | None] = []
        with contextlib.suppress(queue.Empty):
            jobs.append(self._releases.get(timeout=0.2))
            while True:
                jobs.append(self._releases.get_nowait())
        return jobs

    def _renew_due(self, silent: set[tuple[str, int]]) -> None:
        now = time.monotonic()
        with self._lock:
            due = [(name, waiting) for name, waiting in self._waiting.items() if waiting.due <= now]
        for request_id, waiting in due:
            reply = self._send(waiting.params, Renew(*waiting.lease), silent)
            if isinstance(reply, Granted):
                waiting.due = time.monotonic() + reply.seconds / 3
            elif reply is None:  # the lease has two thirds of its term left: ask again
                waiting.due = time.monotonic() + 2 * self._timeout
            else:
                self.remove(request_id)

    def _send(
        self, params: TransferParams, message: Request, silent: set[tuple[str, int]]
    ) -> Reply | None:
        """Send one message; the reply, or None if there was none.

        A peer that does not answer is added to ``silent``; what is in there is not asked.
        """
        peer = params.remote_host, params.remote_port
        if peer in silent:
            self.not_reached += 1
            return None
        try:
            return ask_once(*peer, self._key, self._timeout, message, attempts=1)
        except PeerUnreachable as error:
            self.not_reached += 1
            silent.add(peer)
            logger.warning("transfer %s: %s", params.kvpp.transfer_id, error)
            return None
