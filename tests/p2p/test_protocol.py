"""Frames of the control plane: what comes from a peer is a stranger's word until it is decoded.

A frame is refused for its size, form, version, key, age, or because it was read before. No frame
raises anything but WireError. Field report 1.2: unlike versions must not half understand each
other.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpp_connectors.p2p import protocol as wire
from kvpp_connectors.p2p.protocol import (
    CLOCK_SKEW,
    MAX_REPLY,
    MAX_REQUEST,
    VERSION,
    Codec,
    Confirm,
    Describe,
    Description,
    Gone,
    Granted,
    Noted,
    Open,
    Refused,
    Region,
    Release,
    Released,
    Renew,
    ShareEnded,
    Valid,
    WireError,
)

KEY = b"sixteen bytes at least"
NONCE = bytes(range(16))
REQUESTS = [
    Describe(),
    Open("transfer", 1, "engine", 8),
    Renew("transfer", 2, "engine/1"),
    Confirm("transfer", 3, "engine/1", 7),
    Release("transfer", 4, "engine/1", "the client left"),
    ShareEnded(NONCE, 5, None),
    ShareEnded(NONCE, 4096, "read"),
]
REGION = Region("model.layers.0.attn", (1 << 63) - 1, 4096, 4096, 1000)
REPLIES = [
    Description("epoch", "127.0.0.1:15000", "model@main", 16, "bfloat16", [REGION] * 200),
    Granted(120.0),
    Valid(),
    Gone("expired"),
    Released(),
    Noted(),
    Refused("no"),
]
KEYS = pytest.mark.parametrize("key", [None, KEY], ids=["open", "keyed"])


def pack(value: object) -> bytes:
    """msgpack without any schema."""
    return msgspec.msgpack.encode(value)


def framed(
    body: bytes,
    *,
    version: int = VERSION,
    nonce: bytes = NONCE,
    sent: float | None = None,
    key: bytes | None = None,
    direction: bytes = b"request",
) -> bytes:
    """A frame around ``body``, made by hand as docs/p2p_protocol.md says."""
    sent = time.time() if sent is None else sent
    signed = pack((direction, version, nonce, sent, body))
    mac = b"" if key is None else hmac.new(key, signed, hashlib.sha256).digest()
    return pack((version, nonce, sent, body, mac))


def refusal(frame: bytes, key: bytes | None = None) -> str:
    """Why a request frame is refused, in one word."""
    with pytest.raises(WireError) as error:
        Codec(key).read_request(frame)
    return error.value.reason


@KEYS
@pytest.mark.parametrize("body", REQUESTS, ids=lambda body: type(body).__name__)
def test_a_request_is_read_as_it_was_written(body: Any, key: bytes | None) -> None:
    """And its nonce comes with it."""
    frame, nonce = Codec(key).request(body)
    assert Codec(key).read_request(frame) == (body, nonce)
    assert len(nonce) == 16


@KEYS
@pytest.mark.parametrize("body", REPLIES, ids=lambda body: type(body).__name__)
def test_a_reply_is_read_as_it_was_written(body: Any, key: bytes | None) -> None:
    """By who asked, and not by anybody who asked something else."""
    frame = Codec(key).reply(body, NONCE)
    assert Codec(key).read_reply(frame, NONCE) == body
    with pytest.raises(WireError, match="nonce: the reply answers another request"):
        Codec(key).read_reply(frame, bytes(16))


@KEYS
def test_a_frame_made_by_hand_is_read(key: bytes | None) -> None:
    """The frame is what the protocol's page says; another implementation can speak it."""
    body = pack(
        {"type": "release", "transfer_id": "t", "generation": 1, "party": "e", "reason": "r"}
    )
    assert Codec(key).read_request(framed(body, key=key)) == (Release("t", 1, "e", "r"), NONCE)


def test_no_two_requests_share_a_nonce() -> None:
    """A nonce is what ties a reply to its request."""
    codec = Codec(None)
    assert len({codec.request(Describe())[1] for _ in range(1000)}) == 1000


DEEP = 30_000
SHORT_HEAD = b"\x84\xa4type\xa7release\xaatransfer_id"  # a map of four; the id's value is missing
HOSTILE = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "nil": b"\xc0",
    "deep lists": b"\x91" * DEEP,
    "deep maps": b"\x81\xa1a" * DEEP,
    "deep lists in a known field": b"\x81\xa4type" + b"\x91" * DEEP,
    "deep maps in an unknown field": b"\x82\xa1a" + b"\x81\xa1a" * DEEP,
    "a list of 4 billion": b"\xdd\xff\xff\xff\xff",
    "a map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "text of 4 billion bytes": b"\xdb\xff\xff\xff\xff",
    "bytes of 4 billion": b"\xc6\xff\xff\xff\xff",
    "an id that is no UTF-8": SHORT_HEAD + b"\xa2\xff\xfe",
    "an id of half a surrogate": SHORT_HEAD + b"\xa3\xed\xa0\x80",
    "a tag that does not exist": pack({"type": "shutdown"}),
    "a tag that is no text": pack({"type": 7}),
    "a tag that is a list": pack({"type": ["release"]}),
    "no tag": pack({"transfer_id": "t", "generation": 1}),
    "a reply": pack({"type": "valid"}),
    "a field too many": pack(
        {"type": "renew", "transfer_id": "t", "generation": 1, "x": 1, "party": "e"}
    ),
    "a field too few": pack({"type": "renew", "transfer_id": "t", "party": "e"}),
    "a negative generation": pack(
        {"type": "renew", "transfer_id": "t", "generation": -1, "party": "e"}
    ),
    "a huge generation": pack(
        {"type": "renew", "transfer_id": "t", "generation": 1 << 63, "party": "e"}
    ),
    "a generation that is no number": pack(
        {"type": "renew", "transfer_id": "t", "generation": "", "party": "e"}
    ),
    "an empty id": pack({"type": "renew", "transfer_id": "", "generation": 1, "party": "e"}),
    "a long id": pack({"type": "renew", "transfer_id": "t" * 513, "generation": 1, "party": "e"}),
    "no readers": pack(
        {"type": "open", "transfer_id": "t", "generation": 1, "party": "e", "readers": 0}
    ),
    "a million readers": pack(
        {"type": "open", "transfer_id": "t", "generation": 1, "party": "e", "readers": 10**6}
    ),
    "a reader that is NaN": pack(
        {"type": "confirm", "transfer_id": "t", "generation": 1, "reader": math.nan}
    ),
}


@KEYS
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_body_is_refused_for_its_form(body: bytes, key: bytes | None) -> None:
    """Also from who has the key, and also where the whole frame is that body."""
    body = body[: MAX_REQUEST - 200]
    assert refusal(framed(body, key=key), key) == "form"
    assert refusal(body, key) == "form"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({0: VERSION + 1}, "version"),
        ({0: 1 << 63}, "version"),
        ({0: "1"}, "form"),
        ({1: bytes(15)}, "form"),
        ({1: bytes(17)}, "form"),
        ({2: "now"}, "form"),
        ({3: 5}, "form"),
        ({4: bytes(33)}, "form"),
        ({4: bytes(32)}, "key"),
    ],
)
def test_an_envelope_with_a_wrong_part_is_refused(changes: dict[int, Any], reason: str) -> None:
    """1.2: another version is refused as such, with both numbers, before its body is read."""
    parts = [VERSION, NONCE, time.time(), pack({"type": "describe"}), b""]
    for place, value in changes.items():
        parts[place] = value
    assert refusal(pack(parts)) == reason
    assert refusal(pack(parts[:3])) == "form"
    assert refusal(pack([*parts, 1])) == "form"


def test_frames_over_the_limit_are_refused_before_they_are_decoded() -> None:
    """Both limits, and a frame of exactly the limit is not too long."""
    assert refusal(b"\xc6" + bytes(MAX_REQUEST)) == "size"
    assert refusal(b"\xc6" + bytes(MAX_REQUEST - 1)) == "form"
    with pytest.raises(WireError, match=f"at most {MAX_REPLY:,} are read"):
        Codec(None).read_reply(bytes(MAX_REPLY + 1), NONCE)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0, 1e9])
def test_a_term_that_no_lease_can_have_is_refused(seconds: float) -> None:
    """A heartbeat would never renew, or renew without a pause."""
    body = pack({"type": "granted", "seconds": seconds})
    with pytest.raises(WireError, match="form"):
        Codec(None).read_reply(framed(body), NONCE)


def test_a_description_cannot_be_larger_than_its_reply() -> None:
    """Millions of regions are refused; each region has addresses that exist."""
    region = {"name": "n", "base": 1, "stride": 1, "block_bytes": 1, "num_blocks": 1}
    said = {
        "type": "description",
        "epoch": "e",
        "session": "s",
        "model": "m",
        "block_size": 16,
        "kv_cache_dtype": "d",
    }
    for regions in (
        [region] * 20_000,
        [region | {"base": 0}],
        [region | {"block_bytes": 0}],
        [region | {"num_blocks": 1 << 50}],
        [region | {"stride": -1}],
    ):
        with pytest.raises(WireError, match="form"):
            Codec(None).read_reply(framed(pack(said | {"regions": regions})), NONCE)


class TestKey:
    """With a shared key a frame counts once, in its direction, in its time."""

    @pytest.mark.parametrize(("mine", "theirs"), [(KEY, KEY + b"x"), (KEY, None), (None, KEY)])
    def test_another_key_is_refused(self, mine: bytes | None, theirs: bytes | None) -> None:
        """Also a key against none."""
        frame, nonce = Codec(theirs).request(Describe())
        assert refusal(frame, mine) == "key"
        with pytest.raises(WireError, match="key"):
            Codec(mine).read_reply(Codec(theirs).reply(Valid(), nonce), nonce)

    @pytest.mark.parametrize("place", range(4))
    def test_nothing_of_a_frame_can_be_changed(self, place: int) -> None:
        """Nonce, clock and body are all signed; the version is checked before."""
        parts = msgspec.msgpack.decode(Codec(KEY).request(Renew("transfer", 1, "e"))[0])
        changed = [2, bytes(16), parts[2] + 1, pack({"type": "describe"})]
        parts[place] = changed[place]
        assert refusal(pack(parts), KEY) == ("version" if place == 0 else "key")

    def test_a_reply_is_no_request_and_a_request_no_reply(self) -> None:
        """The direction is signed, even where the body could be both."""
        body = pack({"type": "describe"})
        assert refusal(framed(body, key=KEY, direction=b"reply"), KEY) == "key"
        with pytest.raises(WireError, match="key"):
            Codec(KEY).read_reply(framed(pack({"type": "valid"}), key=KEY), NONCE)

    def test_a_frame_counts_once(self) -> None:
        """A replayed release would free what is being read."""
        reader, (frame, _) = Codec(KEY), Codec(KEY).request(Release("t", 1, "e", "r"))
        reader.read_request(frame)
        for _ in range(2):
            with pytest.raises(WireError, match="replay"):
                reader.read_request(frame)
        other, _ = Codec(KEY).request(Release("t", 1, "e", "r"))
        reader.read_request(other)

    @pytest.mark.parametrize("age", [CLOCK_SKEW + 5, -CLOCK_SKEW - 5, math.inf, math.nan, 1e300])
    def test_a_frame_counts_in_its_time(self, age: float) -> None:
        """What is older than the memory for nonces is refused for its age."""
        body = pack({"type": "describe"})
        assert refusal(framed(body, key=KEY, sent=time.time() - age), KEY) == "age"

    @pytest.mark.parametrize("age", [CLOCK_SKEW - 5, 5 - CLOCK_SKEW])
    def test_a_clock_that_is_a_little_off_is_no_reason(self, age: float) -> None:
        """Both ways."""
        frame = framed(pack({"type": "describe"}), key=KEY, sent=time.time() - age)
        Codec(KEY).read_request(frame)

    def test_a_nonce_is_remembered_as_long_as_its_frame_could_count(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And no longer: memory is bounded by time, and by number."""
        now = [1000.0]
        clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: 1e9 + now[0])
        monkeypatch.setattr(wire, "time", clock)
        monkeypatch.setattr(wire, "_SEEN", 3)

        def numbered(number: int) -> bytes:
            return framed(body, key=KEY, nonce=bytes([number] * 16), sent=clock.time())

        reader = Codec(KEY)
        body = pack({"type": "describe"})
        from_the_future = framed(body, key=KEY, sent=clock.time() + CLOCK_SKEW)
        reader.read_request(from_the_future)
        now[0] += 2 * CLOCK_SKEW  # the last moment at which it is young enough
        with pytest.raises(WireError, match="replay"):
            reader.read_request(from_the_future)
        now[0] += 1
        frames = []
        for number in range(10):  # more than are remembered: all of them count
            now[0] += 1
            frames.append(numbered(number))
            reader.read_request(frames[-1])
        for frame in frames[7:]:
            with pytest.raises(WireError, match="already read"):
                reader.read_request(frame)
        for frame in frames[:7]:  # young enough, and forgotten
            with pytest.raises(WireError, match="before some of the 3 messages"):
                reader.read_request(frame)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
    | st.binary(max_size=40)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text("abc"), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(frame=st.binary(max_size=300), key=st.sampled_from([None, KEY]))
@example(frame=b"\x95\x01", key=None)
def test_random_bytes_raise_nothing_else(frame: bytes, key: bytes | None) -> None:
    """As a frame, as the body of a frame, and as a reply."""
    for attempt in (frame, framed(frame, key=key)):
        assert refusal(attempt, key) in ("form", "version", "key")
        with pytest.raises(WireError):
            Codec(key).read_reply(attempt, NONCE)


@settings(max_examples=400, deadline=None)
@given(values=st.dictionaries(
    st.sampled_from(["transfer_id", "generation", "engine", "readers", "reader", "reason", "x"]),
    VALUES),
    kind=st.sampled_from(["open", "renew", "confirm", "release", "describe"]))  # fmt: skip
def test_wrong_values_in_known_messages_raise_nothing_else(
    values: dict[str, Any], kind: str
) -> None:
    """What is accepted, encodes again to the same message."""
    try:
        body, _ = Codec(None).read_request(framed(pack({"type": kind} | values)))
    except WireError as error:
        assert error.reason == "form"
    else:
        frame, nonce = Codec(None).request(body)
        assert Codec(None).read_request(frame) == (body, nonce)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), body=st.sampled_from(REQUESTS), key=st.sampled_from([None, KEY]))
def test_a_frame_that_was_cut_or_damaged_is_never_another_message(
    data: st.DataObject, body: Any, key: bytes | None
) -> None:
    """Every prefix is refused; with a key, every change of a byte is."""
    frame, _ = Codec(key).request(body)
    assert refusal(frame[: data.draw(st.integers(0, len(frame) - 1))], key) == "form"
    place = data.draw(st.integers(0, len(frame) - 1))
    damaged = bytearray(frame)
    damaged[place] ^= data.draw(st.integers(1, 255))
    if key is not None:
        assert refusal(bytes(damaged), key) in ("form", "version", "key")
        return
    try:
        Codec(None).read_request(bytes(damaged))
    except WireError as error:
        assert error.reason in ("form", "version", "key")
