"""Asks a prefill node from outside an engine: a proxy that releases, a person that looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpp_connectors.p2p.protocol import Describe, Description, Release, Released
from kvpp_connectors.p2p.rpc import ask_once
from kvpp_connectors.p2p.transfer_params import BadOffer, read_offer
from kvpp_core.errors import KvppError

__all__ = ["LeaseReleaser", "describe", "release"]

_PARTY = "nobody"  # no decode engine's request: ends only a lease that none has claimed


class LeaseReleaser:
    """Gives transfers back for the proxy: what is not of this connector is left to its lease."""

    def __init__(self, key: bytes | None, timeout: float = 5.0) -> None:
        self._key, self._timeout = key, timeout

    def release(self, kv_transfer_params: dict[str, Any], /) -> bool:
        """Whether the lease endpoint heard that nobody is going to read.

        Raises:
            PeerUnreachable: it did not answer.
        """
        try:
            return release(kv_transfer_params, "released by the proxy", self._key, self._timeout)
        except BadOffer:
            return False


def release(
    params: Mapping[str, Any], reason: str, key: bytes | None = None, timeout: float = 5.0
) -> bool:
    """Tell the lease in ``kv_transfer_params`` that nobody is going to read it.

    Returns whether the lease endpoint heard it; where it did not, the lease runs out by itself.

    Raises:
        BadOffer: the params are not of this connector.
        PeerUnreachable: no answer within ``timeout`` seconds.
    """
    offer = read_offer(params)
    told = Release(*offer.lease(_PARTY), reason)
    reply = ask_once(offer.remote_host, offer.remote_port, key, timeout, told, attempts=1)
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
