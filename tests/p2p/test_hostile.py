"""A live control server among strangers: nothing that is sent to it ends it, or fills its memory.

Field report 1.1: health is never green with a dead listener thread.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvpp_connectors.p2p.protocol import (
    MAX_REQUEST,
    Codec,
    Confirm,
    Open,
    Refused,
    Release,
    Released,
    Renew,
    Reply,
    Request,
)
from kvpp_connectors.p2p.rpc import ControlClient, ControlServer
from tests.p2p.sides import eventually

KEY = b"a key that all nodes share"
FRAMES = 100_000
GROWTH = 48 << 20  # bytes that the process may grow by while it refuses them


class Server:
    """A control server that counts what reaches its handler."""

    def __init__(self, key: bytes | None) -> None:
        self.handled = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.server = ControlServer(
            "127.0.0.1", 0, key, self._handle, what="the server under test", option="none"
        )
        self.key = key

    def _handle(self, request: Request) -> Reply:
        self.handled += 1
        return Released()

    @property
    def settled(self) -> int:
        """Messages that were refused or handled."""
        return self.server.refused.total() + self.handled

    def stranger(self) -> zmq.Socket[bytes]:
        """A raw socket that is connected to it."""
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDTIMEO, 30_000)
        dealer.connect(f"tcp://127.0.0.1:{self.server.port}")
        return dealer

    def answers(self) -> bool:
        """Whether an honest question gets its answer."""
        client = ControlClient("127.0.0.1", self.server.port, self.key, 10.0)
        try:
            return client.ask(Release("t", 1, "e", "r")) == Released()
        finally:
            client.close()


@pytest.fixture(params=[None, KEY], ids=["open", "keyed"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Without and with a key."""
    server = Server(request.param)
    yield server
    assert server.answers()
    assert server.server.alive
    server.server.close()


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def hostile_frames(key: bytes | None, count: int) -> Iterator[list[bytes]]:
    """Messages of every bad kind; a good one now and then, which is sent again as a replay."""
    chance = random.Random(20261129)
    codecs = [Codec(key), Codec(None), Codec(b"another key, also long")]
    bodies: list[Request] = [
        Open("t", 1, "e", 1),
        Renew("t", 1, "e"),
        Confirm("t", 1, "e", 0),
        Release("t", 1, "e", "r"),
    ]
    good = codecs[0].request(bodies[0])[0]
    for number in range(count):
        kind = number % 8
        if kind == 0:
            good = chance.choice(codecs).request(chance.choice(bodies))[0]
            yield [good]
        elif kind == 1:
            yield [good]
        elif kind == 2:
            yield [good[: chance.randrange(len(good))]]
        elif kind == 3:
            at = chance.randrange(len(good))
            yield [good[:at] + bytes([chance.randrange(256)]) + good[at + 1 :]]
        elif kind == 4:
            yield [b"\x95\x01\xc4\x10" + chance.randbytes(chance.randrange(200))]
        elif kind == 5:
            nest = chance.choice([b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff"])
            body = nest * (2000 if number % 100 < 8 else 30)
            envelope = (1, chance.randbytes(16), time.time(), body, b"")
            yield [msgspec.msgpack.encode(envelope) if chance.random() < 0.5 else body]
        elif kind == 6:
            yield [b"", good] if chance.random() < 0.5 else [good, good, good]
        else:
            yield [chance.randbytes(chance.randrange(400))]


def test_a_hundred_thousand_bad_frames_end_nothing_and_are_all_counted(server: Server) -> None:
    """Each message is refused and counted, or handled; memory stays within a bound."""
    stranger, total, before = server.stranger(), FRAMES // 2, 0
    for number, parts in enumerate(hostile_frames(server.key, total)):
        if number == total // 10:  # the first ones have filled buffers and caches
            eventually(lambda: server.settled >= total // 10)
            before = resident()
        stranger.send_multipart(parts)
    eventually(lambda: server.settled >= total)
    assert server.settled == total
    assert server.server.refused["form"] > total // 2
    assert set(server.server.refused) <= {"form", "version", "key", "replay", "age"}
    assert (server.server.refused["replay"] > 0) == (server.key is not None)
    assert resident() - before < GROWTH
    stranger.close(0)


def test_a_frame_over_the_limit_is_not_even_read(server: Server) -> None:
    """The transport drops it and who sends it; who keeps to the limits is answered."""
    stranger = server.stranger()
    for _ in range(20):
        stranger.send(bytes(MAX_REQUEST + 1))
    assert server.answers()
    assert server.settled == 1
    stranger.close(0)


def test_a_stranger_that_speaks_no_zmq_is_ignored(server: Server) -> None:
    """Port scanners, load balancers' checks, web browsers."""
    for words in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 64, bytes(64)):
        with socket.create_connection(("127.0.0.1", server.server.port), timeout=10) as raw:
            raw.sendall(words)
    assert server.answers()


def test_who_asks_and_does_not_listen_costs_no_memory(server: Server) -> None:
    """Answers that nobody takes are dropped; other peers get theirs."""
    deaf, before = server.stranger(), resident()
    codec = Codec(server.key)
    for _ in range(20_000):
        deaf.send(codec.request(Release("t", 1, "e", "r"))[0])
    eventually(lambda: server.handled >= 20_000)
    assert server.answers()
    assert resident() - before < GROWTH
    deaf.close(0)


def test_many_peers_at_once_are_all_answered(server: Server) -> None:
    """Each gets its own answer while strangers talk nonsense."""
    stranger, done, stop = server.stranger(), [], threading.Event()

    def talk() -> None:
        for parts in hostile_frames(server.key, 10**9):
            if stop.is_set():
                return
            stranger.send_multipart(parts)

    def ask() -> None:
        done.append(all(server.answers() for _ in range(5)))

    noise = threading.Thread(target=talk, daemon=True)
    noise.start()
    askers = [threading.Thread(target=ask, daemon=True) for _ in range(6)]
    for thread in askers:
        thread.start()
    for thread in askers:
        thread.join(60)
    stop.set()
    noise.join(60)
    assert done == [True] * 6
    stranger.close(0)


def test_a_refusal_is_told_where_it_helps_and_silence_is_kept_where_it_does_not() -> None:
    """1.2: the wrong key, clock or version is named to who asked; nonsense gets no answer."""
    server = Server(KEY)
    client = ControlClient("127.0.0.1", server.server.port, None, 5.0)
    with pytest.raises(Exception, match="did not answer release: key: "):
        client.ask(Release("t", 1, "e", "r"), attempts=1)
    client.close()
    stranger, codec = server.stranger(), Codec(KEY)
    frame, nonce = codec.request(Release("t", 1, "e", "r"))
    started = time.monotonic()
    for message in (b"nonsense", frame, frame):
        stranger.send(message)
    assert stranger.poll(10_000)
    assert codec.read_reply(stranger.recv(), nonce) == Released()
    assert stranger.poll(10_000)
    told = codec.read_reply(stranger.recv(), bytes(16))
    assert told == Refused("replay: a message with this nonce was already read")
    assert time.monotonic() - started < 10
    assert server.server.refused == {"key": 1, "form": 1, "replay": 1}
    stranger.close(0)
    server.server.close()
