"""A lease endpoint's answers: from messages to the book, and back."""

from __future__ import annotations

from kvpp_connectors.p2p.lease import LeaseBook
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

__all__ = ["judge"]


def judge(book: LeaseBook, request: Request, seconds: float, now: float) -> Reply:
    """What a lease endpoint answers, by the book."""
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
