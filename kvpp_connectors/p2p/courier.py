"""Carries the decode scheduler's messages to leases, on a thread of its own.

The scheduler never waits for a peer. While a request waits for its turn, its lease is renewed; when
it is clear that nobody will read, the lease is released at once.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass

from kvpp_connectors.log import get_logger
from kvpp_connectors.p2p.control import ControlClient, PeerUnreachable
from kvpp_connectors.p2p.offer import Offer
from kvpp_connectors.p2p.wire import Granted, Release, Renew, Request

__all__ = ["Courier"]

logger = get_logger(__name__)

_FIRST = 1.0  # seconds to the first renewal, which tells how long leases run here
_MOST = 65536  # leases that are kept alive; beyond that a request relies on its first term


@dataclass(slots=True)
class _Kept:
    offer: Offer
    due: float


class Courier:
    """Renews and releases. All methods return at once."""

    def __init__(self, key: bytes | None, timeout: float) -> None:
        self._key, self._timeout = key, timeout
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._releases: queue.SimpleQueue[tuple[Offer, str] | None] = queue.SimpleQueue()
        self._stopped = False
        self.not_reached = 0
        self._thread = threading.Thread(target=self._run, name="kvpp courier", daemon=True)
        self._thread.start()

    def keep(self, request_id: str, offer: Offer) -> None:
        """Renew the lease until `release` or `forget`."""
        with self._lock:
            if len(self._kept) < _MOST:
                self._kept[request_id] = _Kept(offer, time.monotonic() + _FIRST)

    def release(self, request_id: str, reason: str) -> None:
        """Tell the lease that nobody is going to read."""
        with self._lock:
            kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._releases.put((kept.offer, reason))

    def forget(self, request_id: str) -> None:
        """The lease is over without us."""
        with self._lock:
            self._kept.pop(request_id, None)

    def close(self) -> None:
        """Stop; releases that were asked for are still sent."""
        self._stopped = True
        self._releases.put(None)
        self._thread.join(2 * self._timeout)

    def _run(self) -> None:
        while True:
            try:
                job = self._releases.get(timeout=0.2)
            except queue.Empty:
                job = None
            if job is not None:
                offer, reason = job
                details = offer.kvpp
                self._tell(offer, Release(details.transfer_id, details.generation, reason))
            elif self._stopped:
                return
            else:
                self._renew_due()

    def _renew_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [(name, kept) for name, kept in self._kept.items() if kept.due <= now]
        for request_id, kept in due:
            details = kept.offer.kvpp
            term = self._tell(kept.offer, Renew(details.transfer_id, details.generation))
            if term is None:
                self.forget(request_id)
            else:
                kept.due = time.monotonic() + term / 3

    def _tell(self, offer: Offer, message: Request) -> float | None:
        """Send one message; the lease's term in seconds if it goes on."""
        client = ControlClient(offer.remote_host, offer.remote_port, self._key, self._timeout)
        try:
            reply = client.ask(message, attempts=1)
        except PeerUnreachable as error:
            self.not_reached += 1
            logger.warning("transfer %s: %s", offer.kvpp.transfer_id, error)
            return None
        finally:
            client.close()
        return reply.seconds if isinstance(reply, Granted) else None
