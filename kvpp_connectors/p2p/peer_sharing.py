"""How the ranks of a decode group share a pull: each pulls its share, and reads the other shares.

There is no collective and no order among ranks or pulls. A rank whose share has arrived reports it
to the others, which read it from that rank's memory over the transfer engine; a share that is not
there in bounded time is pulled from prefill. vLLM frees a request's blocks only when every rank has
reported the end of its pull, so that a rank's blocks stay what they are while others read them.
docs/p2p_protocol.md, "Sharing".
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvpp_connectors.connector.threads import start_thread
from kvpp_connectors.log import get_logger
from kvpp_connectors.p2p.protocol import (
    Describe,
    Description,
    Noted,
    Region,
    ShareEnded,
    WorkerAddress,
)
from kvpp_connectors.p2p.read_plan import split_shares
from kvpp_connectors.p2p.rpc import ControlClient, PeerUnreachable, ask_once

__all__ = ["NOT_SHARED", "PeerFailed", "PeerPull", "PeerStatus", "Share", "Sharing"]

logger = get_logger(__name__)

_DISTRUST = 30.0  # seconds in which a rank that did not keep its part is not waited for
_EARLY = 4096  # pulls of which others may report before they are known here
_MOST_WAITING = 1024  # messages that wait for one rank


class PeerFailed(Exception):
    """Another rank cannot end this pull well, and so nobody can."""


@dataclass(frozen=True, slots=True)
class Share:
    """Who pulls what of one pull: this rank ``own``, the others ``others``."""

    group: tuple[WorkerAddress, ...]
    member: int  # this rank's place in the group
    own: list[Region]
    others: dict[int, list[Region]] = field(default_factory=dict)


@dataclass(slots=True)
class PeerPull:
    """What was read from other ranks, and the components that have to come from prefill."""

    bytes: int = 0
    left: list[Region] = field(default_factory=list)
    shares_left: int = 0


NOT_SHARED = Share((), 0, [])

ReadFromPeer = Callable[[Description, list[Region]], tuple[int, str | None]]
"""Reads components from a rank; the bytes, and what went wrong if not all are there."""


class PeerStatus:
    """How the shares of other ranks ended, by pull. For several threads.

    A rank may report before this one knows of the pull: such reports are kept, the oldest go first.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._known: dict[bytes, dict[int, str | None]] = {}
        self._early: OrderedDict[bytes, dict[int, str | None]] = OrderedDict()

    def expect(self, ticket: bytes) -> None:
        """This pull is known from now on, until `drop`."""
        with self._changed:
            self._known[ticket] = self._early.pop(ticket, {})

    def note(self, report: ShareEnded) -> None:
        """A rank's report. The first one counts; it may be repeated."""
        with self._changed:
            reports = self._known.get(report.ticket)
            if reports is None:
                reports = self._early.setdefault(report.ticket, {})
                while len(self._early) > _EARLY:
                    self._early.popitem(last=False)
            if len(reports) < _EARLY:
                reports.setdefault(report.member, report.problem)
            self._changed.notify_all()

    def wait(
        self,
        ticket: bytes,
        members: Collection[int],
        deadline: float,
        stop: Callable[[], str | None],
    ) -> dict[int, str | None]:
        """What is known of ``members``, as soon as it is anything; nothing at the deadline."""
        with self._changed:
            while True:
                reports = self._known.get(ticket, {})
                ended = {member: reports[member] for member in members if member in reports}
                seconds = deadline - time.monotonic()
                if ended or seconds <= 0 or stop() is not None:
                    return ended
                self._changed.wait(seconds)

    def wake(self) -> None:
        """Let everybody who waits look at ``stop`` again."""
        with self._changed:
            self._changed.notify_all()

    def drop(self, ticket: bytes) -> None:
        """This pull has ended here."""
        with self._changed:
            self._known.pop(ticket, None)


class _PeerNotifier:
    """Sends reports to one rank on a thread of its own: a dead rank holds up nobody else."""

    def __init__(self, address: WorkerAddress, key: bytes | None, timeout: float) -> None:
        self._client = ControlClient(address.host, address.port, key, timeout)
        self._timeout = timeout
        self._reports: queue.SimpleQueue[ShareEnded | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = start_thread(
            f"kvpp share reports to {self._client.name}",
            self._run,
            "that rank pulls this rank's shares from prefill, each after a wait",
        )

    def send(self, report: ShareEnded) -> None:
        """Returns at once."""
        if self._reports.qsize() < _MOST_WAITING:
            self._reports.put(report)
        else:
            logger.warning(
                "%s answers nothing: %d reports wait for it, one more is dropped; it pulls from "
                "prefill what was not reported to it",
                self._client.name,
                _MOST_WAITING,
            )

    def close(self) -> None:
        """Stop; what was not sent is not sent any more."""
        self._closed.set()
        self._reports.put(None)
        self._thread.join(3 * self._timeout)

    def _run(self) -> None:
        while (report := self._reports.get()) is not None and not self._closed.is_set():
            try:
                reply = self._client.ask(report)
            except PeerUnreachable as error:
                logger.warning("a share was not announced: %s", error)
                continue
            if not isinstance(reply, Noted):
                logger.error("%s answered a share with %s", self._client.name, reply)
        self._client.close()


class Sharing:
    """This rank's part in sharing. For several threads."""

    def __init__(
        self, own: Description, key: bytes | None, control_timeout: float, share_wait: float
    ) -> None:
        self._own, self._key = own, key
        self._timeout, self._wait = control_timeout, share_wait
        self._lock = threading.Lock()
        self._notifiers: dict[WorkerAddress, _PeerNotifier] = {}
        self._described: dict[WorkerAddress, Description] = {}
        self._distrusted: dict[WorkerAddress, float] = {}  # until when
        self.status = PeerStatus()

    def share(self, group: Sequence[WorkerAddress]) -> Share:
        """Who pulls what. `NOT_SHARED` where there is nobody to share with."""
        places = [at for at, address in enumerate(group) if address.epoch == self._own.epoch]
        if len(places) != 1 or len(group) < 2:
            return NOT_SHARED
        shares = split_shares(self._own.regions, len(group))
        others = {at: part for at, part in enumerate(shares) if at != places[0] and part}
        return Share(tuple(group), places[0], shares[places[0]], others)

    def announce(self, share: Share, ticket: bytes, problem: str | None) -> None:
        """Tell the group that this rank's share is there, or why it never will be."""
        report = ShareEnded(ticket, share.member, problem[:500] if problem else problem)
        for at, address in enumerate(share.group):
            if at != share.member:
                self._notifier(address).send(report)

    def pull(
        self,
        share: Share,
        ticket: bytes,
        own_seconds: float,
        read: ReadFromPeer,
        stop: Callable[[], str | None],
    ) -> PeerPull:
        """Read the others' shares as they get ready.

        A rank is waited for ``share_wait_s`` and as long as this rank's own share took; after that,
        where its memory cannot be read, and when ``stop`` gives a reason, its components are left
        for prefill: every component of the others is either read or left.

        Raises:
            PeerFailed: a rank reported that it cannot end this pull.
        """
        started = time.monotonic()
        deadline = started + own_seconds + self._wait
        pulled, waiting = PeerPull(), dict(share.others)
        for member in [m for m in waiting if self._is_distrusted(share.group[m])]:
            self._leave(pulled, waiting.pop(member))
        while waiting:
            ended = self.status.wait(ticket, waiting, deadline, stop)
            self._check(share, ended)
            for member in ended:
                self._pull_one(pulled, share.group[member], waiting.pop(member), read, stop)
            if not ended:
                break
        for member, regions in waiting.items():
            if stop() is None:
                problem = f"no report of its share for {time.monotonic() - started:.1f} s"
                self._distrust(share.group[member], problem)
            self._leave(pulled, regions)
        return pulled

    def close(self) -> None:
        """Stop reporting."""
        with self._lock:
            notifiers, self._notifiers = self._notifiers, {}
        for notifier in notifiers.values():
            notifier.close()

    def _check(self, share: Share, ended: Mapping[int, str | None]) -> None:
        for member, problem in ended.items():
            if problem is not None:
                raise PeerFailed(f"{_name(share.group[member])} gave up its share: {problem}")

    def _pull_one(
        self,
        pulled: PeerPull,
        address: WorkerAddress,
        regions: list[Region],
        read: ReadFromPeer,
        stop: Callable[[], str | None],
    ) -> None:
        peer, problem = self._describe(address)
        if peer is not None:
            count, problem = read(peer, regions)
            pulled.bytes += count
        if problem is not None:
            if stop() is None:
                self._distrust(address, problem)
            self._leave(pulled, regions)

    @staticmethod
    def _leave(pulled: PeerPull, regions: list[Region]) -> None:
        pulled.left += regions
        pulled.shares_left += 1

    def _describe(self, address: WorkerAddress) -> tuple[Description | None, str | None]:
        """What a rank keeps, or why its share cannot be pulled."""
        if (known := self._described.get(address)) is not None:
            return known, None
        try:
            peer = ask_once(address.host, address.port, self._key, self._timeout, Describe())
        except PeerUnreachable as error:
            return None, str(error)
        if not isinstance(peer, Description):
            return None, f"answered describe with {peer}"
        if peer.epoch != address.epoch or _shapes(peer) != _shapes(self._own):
            return None, "keeps other caches than this rank, or was restarted"
        self._described[address] = peer
        return peer, None

    def _distrust(self, address: WorkerAddress, problem: str) -> None:
        logger.warning(
            "%s: %s; its share comes from prefill, as do all within %.0f s from now",
            _name(address),
            problem,
            _DISTRUST,
        )
        with self._lock:
            self._distrusted[address] = time.monotonic() + _DISTRUST
            self._described.pop(address, None)

    def _is_distrusted(self, address: WorkerAddress) -> bool:
        with self._lock:
            return self._distrusted.get(address, 0.0) > time.monotonic()

    def _notifier(self, address: WorkerAddress) -> _PeerNotifier:
        with self._lock:
            if address not in self._notifiers:
                self._notifiers[address] = _PeerNotifier(address, self._key, self._timeout)
            return self._notifiers[address]


def _name(address: WorkerAddress) -> str:
    return f"the decode rank at {address.host}:{address.port}"


def _shapes(side: Description) -> list[tuple[str, int]]:
    """What shares are computed from."""
    return [(region.name, region.block_bytes) for region in side.regions]
