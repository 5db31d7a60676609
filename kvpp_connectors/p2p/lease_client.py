"""A decode worker's dealings with the lease of one transfer, and how a pull fails."""

from __future__ import annotations

from kvpp_connectors.log import get_logger
from kvpp_connectors.p2p.protocol import (
    Confirm,
    Gone,
    Granted,
    Open,
    Release,
    Reply,
    Request,
    Valid,
    party_of,
)
from kvpp_connectors.p2p.rpc import ControlClient, PeerUnreachable
from kvpp_connectors.p2p.transfer_params import Offer

__all__ = ["PullFailed", "ReaderLease"]

logger = get_logger(__name__)


class PullFailed(Exception):
    """A pull cannot succeed. ``reason`` is one word, for counters."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class ReaderLease:
    """Opens, confirms and releases as worker ``reader`` of ``readers`` of an engine."""

    def __init__(
        self,
        request_id: str,
        offer: Offer,
        engine_id: str,
        reader: tuple[int, int],
        key: bytes | None,
        timeout: float,
    ) -> None:
        self._transfer_id = offer.kvpp.transfer_id
        self._reader, self._readers = reader
        self._lease = offer.lease(party_of(engine_id, request_id))
        self._client = ControlClient(offer.remote_host, offer.remote_port, key, timeout)

    def open(self) -> None:
        """Say that this worker is about to read.

        Raises:
            PullFailed: the lease is over, another request's, or nobody answers.
        """
        self._expect(Granted, Open(*self._lease, self._readers))

    def confirm(self) -> None:
        """Say that every read has ended, and hear that the bytes count.

        Raises:
            PullFailed: they do not, or nobody answers.
        """
        self._expect(Valid, Confirm(*self._lease, self._reader))

    def release(self, reason: str) -> None:
        """Best effort: where it does not arrive, the lease runs out."""
        if reason in ("gone", "unreachable"):
            return
        try:
            self._client.ask(Release(*self._lease, reason), attempts=1)
        except PeerUnreachable as error:
            logger.warning("transfer %s was not released: %s", self._transfer_id, error)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _expect(self, wanted: type[Reply], request: Request) -> None:
        try:
            reply = self._client.ask(request)
        except PeerUnreachable as error:
            raise PullFailed("unreachable", str(error)) from error
        if isinstance(reply, Gone):
            raise PullFailed("gone", f"the lease at {self._client.name} is over: {reply.reason}")
        if not isinstance(reply, wanted):
            raise PullFailed("refused", f"{self._client.name} answered {reply}")
