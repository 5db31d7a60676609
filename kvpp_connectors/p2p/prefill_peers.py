"""What a decode worker knows of prefill engines: where each of its components is read."""

from __future__ import annotations

from dataclasses import dataclass

from kvpp_connectors.connector.host import endpoint
from kvpp_connectors.log import get_logger
from kvpp_connectors.p2p.lease_client import PullFailed
from kvpp_connectors.p2p.protocol import Describe, Description, Region, WorkerAddress
from kvpp_connectors.p2p.read_plan import Incompatible, choose_sources
from kvpp_connectors.p2p.rpc import PeerUnreachable, ask_once
from kvpp_connectors.p2p.transfer_params import TransferParams

__all__ = ["PrefillPeers"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Engine:
    addresses: tuple[WorkerAddress, ...]
    sources: dict[str, tuple[str, Region]]


class PrefillPeers:
    """Prefill engines that were described, until a pull from them fails. For several threads."""

    def __init__(self, own: Description, reader: int, key: bytes | None, timeout: float) -> None:
        """``reader``: this worker's rank, which spreads reads over workers that keep the same."""
        self._own, self._reader, self._key, self._timeout = own, reader, key, timeout
        self._engines: dict[str, _Engine] = {}

    def sources(self, params: TransferParams) -> dict[str, tuple[str, Region]]:
        """For each component of this worker, the transfer engine that keeps it and where.

        Raises:
            PullFailed: a worker of the engine does not answer, was restarted, or keeps other KV.
        """
        addresses = tuple(params.kvpp.workers)
        known = self._engines.get(params.remote_engine_id)
        if known is not None and known.addresses == addresses:
            return known.sources
        workers = [self._describe(address) for address in addresses]
        try:
            found = choose_sources(self._own, workers, self._reader)
        except Incompatible as error:
            raise PullFailed("incompatible", str(error)) from error
        self._engines[params.remote_engine_id] = _Engine(addresses, found)
        logger.info(
            "prefill engine %s: %d workers, reading from %s",
            params.remote_engine_id,
            len(workers),
            ", ".join(sorted({session for session, _ in found.values()})),
        )
        return found

    def forget(self, engine_id: str) -> None:
        """Describe the engine anew before the next pull from it."""
        self._engines.pop(engine_id, None)

    def _describe(self, address: WorkerAddress) -> Description:
        name = endpoint(address.host, address.port)
        try:
            reply = ask_once(address.host, address.port, self._key, self._timeout, Describe())
        except PeerUnreachable as error:
            raise PullFailed("unreachable", str(error)) from error
        if not isinstance(reply, Description):
            raise PullFailed("refused", f"{name} answered describe with {reply}")
        if reply.epoch != address.epoch:
            raise PullFailed(
                "restarted", f"the worker at {name} was restarted since the request was prefilled"
            )
        return reply
