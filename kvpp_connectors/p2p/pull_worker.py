"""The decode worker's side of a transfer: open the lease, read, confirm.

    WAITING ─▶ OPENING ─▶ READING ─▶ (READING SHARES ─▶) CONFIRMING ─▶ done
        any of them can fail; reads that were started are waited for first

Only a confirmation inside the lease makes the bytes count. A pull ends when nothing writes to its
blocks any more, and not before: its blocks may be handed out again at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvpp_connectors.connector.threads import log_error, make_executor
from kvpp_connectors.log import get_logger
from kvpp_connectors.p2p.lease_client import PullFailed, ReaderLease
from kvpp_connectors.p2p.messages import Pull, PullResult
from kvpp_connectors.p2p.peer_sharing import NOT_SHARED, PeerFailed, PeerPull, Share, Sharing
from kvpp_connectors.p2p.prefill_peers import PrefillPeers
from kvpp_connectors.p2p.protocol import (
    Description,
    Region,
    ShareEnded,
    WorkerAddress,
)
from kvpp_connectors.p2p.read_plan import Incompatible, plan_reads
from kvpp_connectors.p2p.read_window import ReadEngine, ReadOutcome, read_all

__all__ = ["PullSettings", "PullWorker"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PullSettings:
    """Who this worker is, and the bounds of its waits (seconds)."""

    engine_id: str
    reader: int  # this worker's number among ``readers``
    readers: int
    key: bytes | None
    control_timeout: float
    pull_timeout: float
    window: int
    threads: int
    device: torch.device | None = None  # where the caches lie


class PullWorker:
    """Runs pulls on threads; results are taken from the thread that runs the model."""

    def __init__(
        self,
        own: Description,
        engine: ReadEngine,
        settings: PullSettings,
        sharing: Sharing | None = None,
    ) -> None:
        self._own = own
        self._engine = engine
        self._settings = settings
        self._sharing = sharing
        self._pool = make_executor("kvpp pull", settings.threads, device=settings.device)
        self._lock = threading.Lock()
        self._results: list[PullResult] = []
        self._cancelled: set[str] = set()
        self._running: set[str] = set()
        self._peers = PrefillPeers(own, settings.reader, settings.key, settings.control_timeout)

    def submit(self, pull: Pull, group: Sequence[WorkerAddress] = ()) -> None:
        """Start a pull as soon as a thread is free; ``group`` may share it."""
        share = NOT_SHARED
        if self._sharing is not None:
            share = self._sharing.share(group)
            self._sharing.status.expect(pull.ticket)
        with self._lock:
            self._running.add(pull.request_id)
        log_error(
            self._pool.submit(self._run, pull, share),
            f"request {pull.request_id}: its pull ended with a fault of this package",
        )

    def cancel(self, request_id: str) -> None:
        """Nobody wants the result: submit no more reads. The pull still ends by `take_results`."""
        with self._lock:
            if request_id in self._running:
                self._cancelled.add(request_id)
        if self._sharing is not None:
            self._sharing.status.wake()

    def on_peer_status(self, report: ShareEnded) -> None:
        """Another rank reports how its share of a pull ended."""
        if self._sharing is not None:
            self._sharing.status.note(report)

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
        if self._sharing is not None:
            self._sharing.status.wake()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._sharing is not None:
            self._sharing.close()

    def _run(self, pull: Pull, share: Share) -> None:
        started = time.monotonic()
        lease = self._lease(pull)
        result = PullResult(pull, "a fault of this package; see the log", "internal")
        try:
            pulled, from_peers = self._run_pull(pull, share, lease, started)
            seconds = time.monotonic() - started
            result = PullResult(
                pull, None, "ok", pulled, seconds, from_peers.bytes, from_peers.shares_left
            )
        except PullFailed as failure:
            lease.give_back(failure.reason)
            self._peers.forget(pull.params.remote_engine_id)
            result = PullResult(pull, str(failure), failure.reason)
        finally:  # whatever happened: a pull without a result would hold its request for ever
            lease.close()
            self._end_share(pull, share, result.problem)
            with self._lock:
                self._results.append(result)
                self._running.discard(pull.request_id)
                self._cancelled.discard(pull.request_id)

    def _lease(self, pull: Pull) -> ReaderLease:
        settings = self._settings
        return ReaderLease(
            pull.request_id,
            pull.params,
            settings.engine_id,
            (settings.reader, settings.readers),
            settings.key,
            settings.control_timeout,
        )

    def _run_pull(
        self, pull: Pull, share: Share, lease: ReaderLease, started: float
    ) -> tuple[int, PeerPull]:
        """Bytes that came from prefill, and what came from other ranks."""
        lease.open()
        sources = self._peers.sources(pull.params)
        stop = self._stop_for(pull, started + self._settings.pull_timeout)
        if self._sharing is None or not share.group:
            pulled, from_peers = self._pull(pull, self._own.regions, sources, stop), PeerPull()
        else:
            pulled, from_peers = self._pull_shared(self._sharing, pull, share, sources, stop)
        lease.confirm()
        return pulled, from_peers

    def _pull_shared(
        self,
        sharing: Sharing,
        pull: Pull,
        share: Share,
        sources: Mapping[str, tuple[str, Region]],
        stop: Callable[[], str | None],
    ) -> tuple[int, PeerPull]:
        started = time.monotonic()
        pulled = self._pull(pull, share.own, sources, stop)
        sharing.announce(share, pull.ticket, None)

        def read(peer: Description, regions: list[Region]) -> tuple[int, str | None]:
            theirs = {region.name: (peer.session, region) for region in peer.regions}
            outcome = self._read(regions, theirs, pull.local_blocks, pull.local_blocks, stop)
            return outcome.done_bytes, outcome.problem

        seconds = time.monotonic() - started
        try:
            from_peers = sharing.pull(share, pull.ticket, seconds, read, stop)
        except PeerFailed as error:
            raise PullFailed("peer", str(error)) from error
        return pulled + self._pull(pull, from_peers.left, sources, stop), from_peers

    def _end_share(self, pull: Pull, share: Share, problem: str | None) -> None:
        """Let nobody wait for a share that will not be there; the first report of it counts."""
        if self._sharing is None:
            return
        if share.group and problem is not None:
            self._sharing.announce(share, pull.ticket, problem)
        self._sharing.status.drop(pull.ticket)

    def _pull(
        self,
        pull: Pull,
        regions: Iterable[Region],
        sources: Mapping[str, tuple[str, Region]],
        stop: Callable[[], str | None],
    ) -> int:
        """Read components from prefill; the bytes."""
        outcome = self._read(regions, sources, pull.remote_blocks, pull.local_blocks, stop)
        if outcome.problem is not None:
            cancelled = pull.request_id in self._cancelled
            raise PullFailed("cancelled" if cancelled else "read", outcome.problem)
        return outcome.done_bytes

    def _read(
        self,
        regions: Iterable[Region],
        sources: Mapping[str, tuple[str, Region]],
        there: Sequence[int],
        here: Sequence[int],
        stop: Callable[[], str | None],
    ) -> ReadOutcome:
        try:
            reads = plan_reads(regions, sources, there, here)
        except Incompatible as error:
            raise PullFailed("incompatible", str(error)) from error
        return read_all(self._engine, reads, self._settings.window, stop)

    def _stop_for(self, pull: Pull, deadline: float) -> Callable[[], str | None]:
        def stop() -> str | None:
            if pull.request_id in self._cancelled:
                return "the request was aborted"
            if time.monotonic() > deadline:
                return f"the reads took more than pull_timeout_s = {self._settings.pull_timeout:g}"
            return None

        return stop
