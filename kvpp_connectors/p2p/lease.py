"""Leases: how long a prefill engine keeps a finished request's blocks for decode, and for whom.

One `LeaseBook` lives in the prefill engine's scheduler process and decides alone: what a reader has
read counts if the book calls the confirmation valid, and blocks are handed out again only after the
lease has ended. Unknown, late and repeated messages are legal and change nothing.

    grant ──▶ HELD ── every reader confirmed ──▶ ended ("read")
                  ├── release ─────────────────▶ ended ("released: ...")
                  └── expiry ──────────────────▶ ended ("expired")

Clocks are the book's own (seconds, monotonic); ``now`` is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvpp_connectors.p2p.protocol import (
    Confirm,
    Gone,
    Granted,
    Open,
    Refused,
    Release,
    Released,
    Renew,
    Reply,
    Request,
    Valid,
)

__all__ = ["Ended", "LeaseBook", "answer"]

_REMEMBERED = 4096  # leases that are over, of which the reason is still known


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease that is over: its request's blocks may be freed."""

    request_id: str
    reason: str


@dataclass(slots=True)
class _Lease:
    request_id: str
    generation: int
    expires: float
    confirmed: set[int] = field(default_factory=set)
    party: str | None = None  # the decode request that renewed or opened it first
    readers: int | None = None  # its workers, once one has opened


@dataclass(frozen=True, slots=True)
class _Over:
    """A lease that has ended. A reader that confirmed in time may ask again."""

    generation: int
    reason: str
    party: str | None
    confirmed: frozenset[int]


class LeaseBook:
    """All leases of one prefill engine. Not for several threads at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._held: dict[str, _Lease] = {}
        self._over: OrderedDict[str, _Over] = OrderedDict()
        self._ended: list[Ended] = []
        self._generation = 0
        self.counts = {"granted": 0, "read": 0, "released": 0, "expired": 0}

    @property
    def held(self) -> int:
        """Leases that hold blocks."""
        return len(self._held)

    def grant(self, transfer_id: str, request_id: str, now: float) -> int:
        """Hold a request's blocks for readers; returns the generation they must name.

        Raises:
            ValueError: the transfer id is in use by another live lease.
        """
        if transfer_id in self._held:
            raise ValueError(f"transfer {transfer_id} is already on offer")
        self._generation += 1
        self._over.pop(transfer_id, None)
        self._held[transfer_id] = _Lease(request_id, self._generation, now + self._seconds)
        self.counts["granted"] += 1
        return self._generation

    def open(
        self, transfer_id: str, generation: int, party: str, readers: int, now: float
    ) -> str | None:
        """A worker of ``party`` (a decode engine's request) begins, which renews the lease.

        Returns None, or why it may not.
        """
        lease, why = self._find(transfer_id, generation, party, now)
        if lease is None:
            return why
        if lease.readers not in (None, readers):
            return f"its party has {lease.readers} readers, not {readers}"
        lease.party, lease.readers = party, readers
        lease.expires = now + self._seconds
        return None

    def renew(self, transfer_id: str, generation: int, party: str, now: float) -> str | None:
        """The readers of ``party`` are still coming. None, or why there is nothing to renew.

        From then on the lease is this party's.
        """
        lease, why = self._find(transfer_id, generation, party, now)
        if lease is not None:
            lease.party = party
            lease.expires = now + self._seconds
        return why

    def confirm(
        self, transfer_id: str, generation: int, party: str, reader: int, now: float
    ) -> str | None:
        """A reader's reads have all ended. None if they count, or why they do not.

        A reader that asks again, because the first answer was lost, gets the same answer.
        """
        lease, why = self._find(transfer_id, generation, party, now)
        if lease is None:
            over = self._over.get(transfer_id)
            asked = generation, party
            if over and (over.generation, over.party) == asked and reader in over.confirmed:
                return None
            return why
        if lease.readers is None:
            return "confirmed without having been opened"
        if reader >= lease.readers:
            return f"reader {reader} of {lease.readers}"
        lease.confirmed.add(reader)
        if len(lease.confirmed) >= lease.readers:
            self._end(transfer_id, "read", "read")
        return None

    def release(
        self, transfer_id: str, generation: int, party: str, reason: str, now: float
    ) -> None:
        """``party`` does not read (any more). Legal at any time and any number of times.

        Another party's lease stays as it is.
        """
        lease, _ = self._find(transfer_id, generation, party, now)
        if lease is not None:
            self._end(transfer_id, "released", f"released: {reason}")

    def expire(self, now: float) -> None:
        """End every lease whose time is over."""
        for transfer_id in [t for t, lease in self._held.items() if lease.expires <= now]:
            self._end(transfer_id, "expired", "expired")

    def take_ended(self) -> list[Ended]:
        """Leases that have ended since the last call, each once."""
        ended, self._ended = self._ended, []
        return ended

    def _find(
        self, transfer_id: str, generation: int, party: str, now: float
    ) -> tuple[_Lease | None, str | None]:
        lease = self._held.get(transfer_id)
        if lease is not None and lease.expires <= now:
            self._end(transfer_id, "expired", "expired")
            lease = None
        if lease is None:
            over = self._over.get(transfer_id)
            return None, over.reason if over else "unknown transfer"
        if lease.generation != generation:
            return None, f"generation {generation} is over, {lease.generation} is on offer"
        if lease.party not in (None, party):
            return None, "another decode request reads it"
        return lease, None

    def _end(self, transfer_id: str, count: str, reason: str) -> None:
        lease = self._held.pop(transfer_id)
        self.counts[count] += 1
        self._ended.append(Ended(lease.request_id, reason))
        self._over[transfer_id] = _Over(
            lease.generation, reason, lease.party, frozenset(lease.confirmed)
        )
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)


def answer(book: LeaseBook, request: Request, seconds: float, now: float) -> Reply:
    """What the endpoint of a lease book answers."""
    match request:
        case Open(transfer, generation, party, readers):
            why = book.open(transfer, generation, party, readers, now)
            return Gone(why) if why else Granted(seconds)
        case Renew(transfer, generation, party):
            why = book.renew(transfer, generation, party, now)
            return Gone(why) if why else Granted(seconds)
        case Confirm(transfer, generation, party, reader):
            why = book.confirm(transfer, generation, party, reader, now)
            return Gone(why) if why else Valid()
        case Release(transfer, generation, party, reason):
            book.release(transfer, generation, party, reason, now)
            return Released()
    return Refused("a lease endpoint; workers describe themselves at kv_port")
