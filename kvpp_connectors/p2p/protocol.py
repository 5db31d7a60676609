"""The messages of the P/D control plane, and how they become bytes.

One message is one frame: msgpack of an `Envelope` with a version, a nonce, the sender's clock, the
body and, where a key is shared, an HMAC over all of it. What comes from a peer is decoded by a
schema with size limits before anybody looks at it. docs/p2p_protocol.md.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from typing import Annotated, TypeVar

import msgspec

__all__ = [
    "MAX_REPLY",
    "MAX_REQUEST",
    "TICKET",
    "VERSION",
    "Codec",
    "Confirm",
    "Describe",
    "Description",
    "Gone",
    "Granted",
    "Noted",
    "Open",
    "Refused",
    "Region",
    "Release",
    "Released",
    "Renew",
    "Reply",
    "Request",
    "ShareEnded",
    "Valid",
    "WireError",
    "WorkerAddress",
    "party_of",
]

VERSION = 1
MAX_REQUEST = 64 << 10  # bytes of a request frame
MAX_REPLY = 8 << 20  # bytes of a reply frame
TICKET = 16  # bytes of the secret that names one pull inside a decode engine
CLOCK_SKEW = 60.0  # seconds that two hosts' clocks may differ, where a key is shared
_SEEN = 1 << 18  # nonces that a guard remembers: 2,000 messages a second for two skews

Short = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Address = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


Body = TypeVar("Body")


def party_of(engine_id: str, request_id: str) -> str:
    """Who reads: one request of one decode engine, all of its workers together.

    Another request with the same transfer is another party: its reads could come after the first
    one's confirmation, which lets the blocks go.
    """
    digest = hashlib.sha256(request_id.encode(errors="replace")).hexdigest()[:16]
    return f"{engine_id}/{digest}"


class WireError(Exception):
    """A frame that is refused. ``reason`` is one of a few, for counters."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all bodies."""


class Transfer(_Message, frozen=True, forbid_unknown_fields=True):
    """Which lease is meant: a finished prefill request, which grant of it, and who asks."""

    transfer_id: Short
    generation: Count
    party: Short  # a decode engine's request: see `party_of`


class Describe(_Message, tag="describe", frozen=True, forbid_unknown_fields=True):
    """To a worker: what do you keep, and where?"""


class Open(Transfer, tag="open", frozen=True, forbid_unknown_fields=True):
    """To the lease endpoint: one of ``readers`` workers of a decode engine is about to read."""

    readers: Annotated[int, msgspec.Meta(ge=1, le=4096)]


class Renew(Transfer, tag="renew", frozen=True, forbid_unknown_fields=True):
    """The request waits for its turn at the decode side."""


class Confirm(Transfer, tag="confirm", frozen=True, forbid_unknown_fields=True):
    """All reads of worker ``reader`` have ended; were the blocks still the request's?"""

    reader: Annotated[int, msgspec.Meta(ge=0, le=4096)]


class Release(Transfer, tag="release", frozen=True, forbid_unknown_fields=True):
    """The party is not going to read (any more)."""

    reason: Short


class ShareEnded(_Message, tag="share_ended", frozen=True, forbid_unknown_fields=True):
    """To a rank of one's own decode group: the share of ``member`` is there, or will not be."""

    ticket: Annotated[bytes, msgspec.Meta(min_length=TICKET, max_length=TICKET)]
    member: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    problem: Short | None


class Region(_Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One component's cache on a worker: block i is ``block_bytes`` at ``base + i * stride``.

    Within a block the tokens of a head follow each other (``heads_first``), or a token's heads do.
    """

    name: Short
    base: Address
    stride: Count
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    heads_first: bool = False


class Description(_Message, tag="description", frozen=True, forbid_unknown_fields=True):
    """What a prefill worker keeps. ``epoch`` is new with each start of the process."""

    epoch: Short
    session: Short  # the transfer engine's name, host:port
    model: Short
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    kv_cache_dtype: Short
    regions: Annotated[list[Region], msgspec.Meta(max_length=1 << 14)]


class Granted(_Message, tag="granted", frozen=True, forbid_unknown_fields=True):
    """The lease runs for ``seconds`` from the lease holder's answer."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)]


class Valid(_Message, tag="valid", frozen=True, forbid_unknown_fields=True):
    """What was read before the confirmation is the request's KV."""


class Gone(_Message, tag="gone", frozen=True, forbid_unknown_fields=True):
    """There is no such lease (any more): nothing that was read counts."""

    reason: Short


class Released(_Message, tag="released", frozen=True, forbid_unknown_fields=True):
    """The party keeps nothing: the blocks are free, or another party's."""


class Noted(_Message, tag="noted", frozen=True, forbid_unknown_fields=True):
    """A rank's report of its share has arrived."""


class Refused(_Message, tag="refused", frozen=True, forbid_unknown_fields=True):
    """The request was understood and is not answered."""

    reason: Short


class WorkerAddress(_Message, frozen=True, forbid_unknown_fields=True):
    """Where a prefill worker answers `Describe`."""

    host: Short
    port: Port
    epoch: Short


Request = Describe | Open | Renew | Confirm | Release | ShareEnded
Reply = Description | Granted | Valid | Gone | Released | Noted | Refused


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A frame: ``mac`` is empty where no key is shared; a reply repeats its request's nonce."""

    version: int
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    sent: float  # seconds since 1970
    body: bytes
    mac: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


class Codec:
    """Encodes and decodes frames, with or without a shared key. Not for several threads at once."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        # nonce -> when it may be forgotten (monotonic), when it was sent (the sender's clock)
        self._seen: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        self._forgotten = 0.0  # sent no later than this: might be one that was forgotten early
        self._envelopes = msgspec.msgpack.Decoder(Envelope)
        self._requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
        self._replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

    def request(self, body: Request) -> tuple[bytes, bytes]:
        """A frame for a new request, and its nonce."""
        nonce = secrets.token_bytes(16)
        return self._frame(body, nonce, b"request"), nonce

    def reply(self, body: Reply, nonce: bytes) -> bytes:
        """A frame that answers the request with ``nonce``."""
        return self._frame(body, nonce, b"reply")

    def read_request(self, frame: bytes) -> tuple[Request, bytes]:
        """The body of a request and its nonce.

        Raises:
            WireError: size, form, version, key, age, or a nonce that was seen before.
        """
        envelope = self._open(frame, MAX_REQUEST, b"request")
        if self._key is not None:
            self._guard(envelope)
        return _decoded(self._requests, envelope.body), envelope.nonce

    def read_reply(self, frame: bytes, nonce: bytes) -> Reply:
        """The body of the reply to the request with ``nonce``.

        Raises:
            WireError: size, form, version, key, or it answers something else.
        """
        envelope = self._open(frame, MAX_REPLY, b"reply")
        if envelope.nonce != nonce:
            raise WireError("nonce", "the reply answers another request")
        return _decoded(self._replies, envelope.body)

    def _frame(self, body: object, nonce: bytes, direction: bytes) -> bytes:
        packed, sent = msgspec.msgpack.encode(body), time.time()
        mac = self._mac(direction, VERSION, nonce, sent, packed)
        return msgspec.msgpack.encode(Envelope(VERSION, nonce, sent, packed, mac))

    def _open(self, frame: bytes, limit: int, direction: bytes) -> Envelope:
        if len(frame) > limit:
            raise WireError("size", f"{len(frame):,} bytes, at most {limit:,} are read")
        try:
            envelope = self._envelopes.decode(frame)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError("form", str(error)) from error
        if envelope.version != VERSION:
            raise WireError("version", f"{envelope.version}, this side speaks {VERSION}")
        expected = self._mac(
            direction, envelope.version, envelope.nonce, envelope.sent, envelope.body
        )
        if not hmac.compare_digest(expected, envelope.mac):
            raise WireError("key", "the message was not signed with this side's key")
        return envelope

    def _guard(self, envelope: Envelope) -> None:
        """Refuse what was seen before; what is too old to be remembered is refused for its age."""
        if not abs(time.time() - envelope.sent) <= CLOCK_SKEW:
            raise WireError("age", f"sent at {envelope.sent:.0f}; are both clocks right?")
        now = time.monotonic()
        while self._seen and next(iter(self._seen.values()))[0] < now:
            self._seen.popitem(last=False)
        if envelope.sent <= self._forgotten:
            raise WireError(
                "age",
                f"sent at {envelope.sent:.0f}: before some of the {_SEEN:,} messages that this "
                "side remembers",
            )
        if envelope.nonce in self._seen:
            raise WireError("replay", "a message with this nonce was already read")
        if len(self._seen) >= _SEEN:
            _, (_, sent) = self._seen.popitem(last=False)
            self._forgotten = max(self._forgotten, sent)
        self._seen[envelope.nonce] = now + 2 * CLOCK_SKEW, envelope.sent

    def _mac(self, direction: bytes, version: int, nonce: bytes, sent: float, body: bytes) -> bytes:
        if self._key is None:
            return b""
        signed = msgspec.msgpack.encode((direction, version, nonce, sent, body))
        return hmac.new(self._key, signed, hashlib.sha256).digest()


def _decoded(decoder: msgspec.msgpack.Decoder[Body], body: bytes) -> Body:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError("form", str(error)) from error
