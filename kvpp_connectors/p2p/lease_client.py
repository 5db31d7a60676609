"""Clients of a prefill engine's endpoints: a decode worker that reads under a lease, a proxy that
releases one, a person who looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpp_connectors.log import get_logger
from kvpp_connectors.p2p.protocol import (
    Confirm,
    Describe,
    Description,
    Gone,
    Granted,
    Open,
    Release,
    Released,
    Reply,
    Request,
    Valid,
    party_of,
)
from kvpp_connectors.p2p.rpc import ControlClient, PeerUnreachable, ask_once
from kvpp_connectors.p2p.transfer_params import BadTransferParams, TransferParams, read_params
from kvpp_core.errors import KvppError

__all__ = ["LeaseReleaser", "PullFailed", "ReaderLease", "describe", "release_transfer"]

logger = get_logger(__name__)

_PARTY = "nobody"  # no decode engine's request: ends only a lease that none has claimed


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
        params: TransferParams,
        engine_id: str,
        reader: tuple[int, int],
        key: bytes | None,
        timeout: float,
    ) -> None:
        self._transfer_id = params.kvpp.transfer_id
        self._reader, self._readers = reader
        self._lease = params.lease(party_of(engine_id, request_id))
        self._client = ControlClient(params.remote_host, params.remote_port, key, timeout)

    def open(self) -> None:
        """Say that this worker is about to read.

        Raises:
            PullFailed: the lease is over, another request's, or nobody answers.
        """
        self._expect(Granted, Open(*self._lease, self._readers))

    def confirm(self) -> None:
        """Say that every read has ended, and learn that the bytes count.

        Raises:
            PullFailed: they do not, or nobody answers.
        """
        self._expect(Valid, Confirm(*self._lease, self._reader))

    def give_back(self, reason: str) -> None:
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


class LeaseReleaser:
    """Releases transfers for the proxy: one that is not of this connector is left to its lease."""

    def __init__(self, key: bytes | None, timeout: float = 5.0) -> None:
        self._key, self._timeout = key, timeout

    def release(self, kv_transfer_params: dict[str, Any], /) -> bool:
        """Whether the lease endpoint knows that nobody is going to read.

        Raises:
            PeerUnreachable: it did not answer.
        """
        try:
            return release_transfer(
                kv_transfer_params, "released by the proxy", self._key, self._timeout
            )
        except BadTransferParams:
            return False


def release_transfer(
    kv_transfer_params: Mapping[str, Any],
    reason: str,
    key: bytes | None = None,
    timeout: float = 5.0,
) -> bool:
    """Tell the lease endpoint that nobody is going to read a prefilled request.

    Returns whether the endpoint did; where it does not, the lease runs out by itself.

    Raises:
        BadTransferParams: the params are not of this connector.
        PeerUnreachable: no answer within ``timeout`` seconds.
    """
    params = read_params(kv_transfer_params)
    message = Release(*params.lease(_PARTY), reason)
    reply = ask_once(params.remote_host, params.remote_port, key, timeout, message, attempts=1)
    return isinstance(reply, Released)


def describe(host: str, port: int, key: bytes | None = None, timeout: float = 5.0) -> Description:
    """What a prefill worker publishes.

    Raises:
        PeerUnreachable: no answer in time, or it refused the message.
        KvppError: it answered something else.
    """
    reply = ask_once(host, port, key, timeout, Describe())
    if not isinstance(reply, Description):
        raise KvppError(f"{host}:{port} is no prefill worker; it answered {reply}")
    return reply
