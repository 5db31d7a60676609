"""The decode worker's side of a transfer: open the lease, read, confirm.

    WAITING ─▶ OPENING ─▶ READING ─▶ CONFIRMING ─▶ done
        any of them can fail; reads that were started are waited for first

Only a confirmation inside the lease makes the bytes count. A pull ends when nothing writes to its
blocks any more, and not before: its blocks may be handed out again at once.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from kvpp_connectors.log import get_logger
from kvpp_connectors.p2p.control import ControlClient, PeerUnreachable
from kvpp_connectors.p2p.offer import Offer
from kvpp_connectors.p2p.plan import Incompatible, choose_sources, plan_reads
from kvpp_connectors.p2p.reads import ReadEngine, read_all
from kvpp_connectors.p2p.wire import (
    Confirm,
    Describe,
    Description,
    Gone,
    Granted,
    Open,
    Region,
    Release,
    Reply,
    Request,
    Valid,
    WorkerAddress,
)

__all__ = ["Pull", "PullResult", "Puller", "PullerSettings"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pull:
    """One request's KV to fetch: ``remote_blocks[i]`` of the offer into ``local_blocks[i]``."""

    request_id: str
    offer: Offer
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PullResult:
    """How a pull ended. ``problem`` is None if every block holds the request's KV."""

    pull: Pull
    problem: str | None
    reason: str  # one word, for counters
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PullerSettings:
    """Who this worker is, and the bounds of its waits (seconds)."""

    engine_id: str
    reader: int  # this worker's number among ``readers``
    readers: int
    key: bytes | None
    control_timeout: float
    pull_timeout: float
    window: int
    threads: int


class _Failure(Exception):
    """A pull cannot succeed."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(slots=True)
class _Sources:
    """What is known of one prefill engine: where each of our components is read."""

    addresses: tuple[WorkerAddress, ...]
    by_name: dict[str, tuple[str, Region]] = field(default_factory=dict)


class Puller:
    """Runs pulls on threads; results are taken from the thread that runs the model."""

    def __init__(self, own: Description, engine: ReadEngine, settings: PullerSettings) -> None:
        self._own = own
        self._engine = engine
        self._settings = settings
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="kvpp pull")
        self._lock = threading.Lock()
        self._results: list[PullResult] = []
        self._cancelled: set[str] = set()
        self._running: set[str] = set()
        self._peers: dict[str, _Sources] = {}

    def submit(self, pull: Pull) -> None:
        """Start a pull as soon as a thread is free."""
        with self._lock:
            self._running.add(pull.request_id)
        self._pool.submit(self._run, pull).add_done_callback(_log_bug)

    def cancel(self, request_id: str) -> None:
        """Nobody wants the result: submit no more reads. The pull still ends by `take_results`."""
        with self._lock:
            if request_id in self._running:
                self._cancelled.add(request_id)

    def take_results(self) -> list[PullResult]:
        """Pulls that have ended since the last call, each once."""
        with self._lock:
            results, self._results = self._results, []
        return results

    @property
    def in_flight(self) -> int:
        """Pulls that have not ended."""
        return len(self._running)

    def close(self) -> None:
        """Cancel what runs and wait for it."""
        with self._lock:
            self._cancelled |= self._running
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, pull: Pull) -> None:
        started = time.monotonic()
        lease = _Lease(pull, self._settings)
        result = PullResult(pull, "a fault of this package; see the log", "internal")
        try:
            count = self._fetch(pull, lease, started)
            result = PullResult(pull, None, "ok", count, time.monotonic() - started)
        except _Failure as failure:
            lease.release(failure.reason)
            self._peers.pop(pull.offer.remote_engine_id, None)
            result = PullResult(pull, str(failure), failure.reason)
        finally:  # whatever happened: a pull without a result would hold its request for ever
            lease.close()
            with self._lock:
                self._results.append(result)
                self._running.discard(pull.request_id)
                self._cancelled.discard(pull.request_id)

    def _fetch(self, pull: Pull, lease: _Lease, started: float) -> int:
        lease.open()
        sources = self._sources(pull.offer)
        try:
            reads = plan_reads(self._own.regions, sources, pull.remote_blocks, pull.local_blocks)
        except Incompatible as error:
            raise _Failure("incompatible", str(error)) from error
        deadline = started + self._settings.pull_timeout
        outcome = read_all(
            self._engine, reads, self._settings.window, self._stop_for(pull, deadline)
        )
        if outcome.problem is not None:
            raise _Failure(
                "cancelled" if pull.request_id in self._cancelled else "read", outcome.problem
            )
        lease.confirm()
        return outcome.done_bytes

    def _stop_for(self, pull: Pull, deadline: float) -> Callable[[], str | None]:
        def stop() -> str | None:
            if pull.request_id in self._cancelled:
                return "the request was aborted"
            if time.monotonic() > deadline:
                return f"the reads took more than pull_timeout_s = {self._settings.pull_timeout:g}"
            return None

        return stop

    def _sources(self, offer: Offer) -> dict[str, tuple[str, Region]]:
        addresses = tuple(offer.kvpp.workers)
        known = self._peers.get(offer.remote_engine_id)
        if known is not None and known.addresses == addresses:
            return known.by_name
        workers = [self._describe(address) for address in addresses]
        try:
            found = choose_sources(self._own, workers, self._settings.reader)
        except Incompatible as error:
            raise _Failure("incompatible", str(error)) from error
        self._peers[offer.remote_engine_id] = _Sources(addresses, found)
        logger.info(
            "prefill engine %s: %d workers, reading from %s",
            offer.remote_engine_id,
            len(workers),
            ", ".join(sorted({session for session, _ in found.values()})),
        )
        return found

    def _describe(self, address: WorkerAddress) -> Description:
        client = ControlClient(
            address.host, address.port, self._settings.key, self._settings.control_timeout
        )
        try:
            reply = client.ask(Describe())
        except PeerUnreachable as error:
            raise _Failure("unreachable", str(error)) from error
        finally:
            client.close()
        if not isinstance(reply, Description):
            raise _Failure("refused", f"{client.name} answered describe with {reply}")
        if reply.epoch != address.epoch:
            raise _Failure(
                "restarted",
                f"the worker at {client.name} was restarted since the request was prefilled",
            )
        return reply


def _log_bug(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("a pull ended with a fault of this package", exc_info=error)


class _Lease:
    """This worker's dealings with the lease of one transfer."""

    def __init__(self, pull: Pull, settings: PullerSettings) -> None:
        offer = pull.offer
        self._offer = offer.kvpp
        self._settings = settings
        # Workers of one request share a lease. Another request with the same offer must not: its
        # reads could come after the first one's confirmation, which lets the blocks go.
        digest = hashlib.sha256(pull.request_id.encode(errors="replace")).hexdigest()[:16]
        self._party = f"{settings.engine_id}/{digest}"
        self._client = ControlClient(
            offer.remote_host, offer.remote_port, settings.key, settings.control_timeout
        )

    def open(self) -> None:
        self._expect(
            Granted,
            Open(
                self._offer.transfer_id,
                self._offer.generation,
                self._party,
                self._settings.readers,
            ),
        )

    def confirm(self) -> None:
        self._expect(
            Valid, Confirm(self._offer.transfer_id, self._offer.generation, self._settings.reader)
        )

    def release(self, reason: str) -> None:
        """Best effort: where it does not arrive, the lease runs out."""
        if reason in ("gone", "unreachable"):
            return
        try:
            self._client.ask(
                Release(self._offer.transfer_id, self._offer.generation, reason), attempts=1
            )
        except PeerUnreachable as error:
            logger.warning("transfer %s was not released: %s", self._offer.transfer_id, error)

    def close(self) -> None:
        self._client.close()

    def _expect(self, wanted: type[Reply], request: Request) -> None:
        try:
            reply = self._client.ask(request)
        except PeerUnreachable as error:
            raise _Failure("unreachable", str(error)) from error
        if isinstance(reply, Gone):
            raise _Failure("gone", f"the lease at {self._client.name} is over: {reply.reason}")
        if not isinstance(reply, wanted):
            raise _Failure("refused", f"{self._client.name} answered {reply}")
