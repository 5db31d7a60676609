"""Endpoints of the P/D control plane: a server thread that answers, a client that asks.

An endpoint is bound before it is published, and what is published is what was bound. A frame that
is refused is counted by reason and answered only where its sender can learn something from it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing

import zmq

from kvpp_connectors.connector.host import endpoint
from kvpp_connectors.connector.threads import start_thread
from kvpp_connectors.log import get_logger
from kvpp_connectors.p2p.protocol import (
    MAX_REPLY,
    MAX_REQUEST,
    Codec,
    Refused,
    Reply,
    Request,
    WireError,
)
from kvpp_core.errors import KvppError

__all__ = ["ControlClient", "ControlServer", "PeerUnreachable", "ask_once"]

logger = get_logger(__name__)

_TICK = 0.1  # seconds between two calls of ``tick``
_ANSWERED = ("version", "key", "age", "replay")  # refusals that the sender gets an answer to


class PeerUnreachable(KvppError):
    """A peer did not answer in time, or not in a way that can be read."""


class ControlServer:
    """Answers requests on one endpoint, in a thread of its own.

    ``handle`` and ``tick`` are called from that thread. ``port`` 0 takes a free one.

    Raises:
        KvppError: the address cannot be bound; names it, and ``what`` and ``option``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes | None,
        handle: Callable[[Request], Reply],
        *,
        what: str,
        option: str,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = host
        self.refused: Counter[str] = Counter()
        self._codec = Codec(key)
        self._handle, self._tick, self._what = handle, tick, what
        self._context = zmq.Context()
        self._socket = self._bind(port, option)
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._stop = threading.Event()
        self._thread = start_thread(
            f"kvpp {what}",
            self._serve,
            f"nobody answers at {host}:{self.port} any more; restart the engine",
        )

    @property
    def alive(self) -> bool:
        """Whether somebody answers here."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop answering and free the port."""
        self._stop.set()
        self._thread.join(10)
        self._socket.close(0)
        self._context.destroy(0)

    def _bind(self, port: int, option: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST)
        socket.setsockopt(zmq.IPV6, int(":" in self.host))
        try:
            socket.bind(_address(self.host, port))
        except zmq.ZMQError as error:
            socket.close(0)
            self._context.destroy(0)
            raise KvppError(
                f"{self._what} cannot listen on {self.host}:{port}: {error}. Give {option} another "
                "value, or find who holds the port."
            ) from error
        return socket

    def _serve(self) -> None:
        next_tick = time.monotonic()
        while not self._stop.is_set():
            if self._socket.poll(int(_TICK * 1000)):
                self._answer(self._socket.recv_multipart())
            if time.monotonic() >= next_tick:
                self._tick()
                next_tick = time.monotonic() + _TICK

    def _answer(self, parts: list[bytes]) -> None:
        if len(parts) != 2:
            self._refuse("form", f"{len(parts) - 1} frames")
            return
        peer, frame = parts
        try:
            request, nonce = self._codec.read_request(frame)
        except WireError as error:
            self._refuse(error.reason, str(error))
            if error.reason in _ANSWERED:
                self._send(peer, self._codec.reply(Refused(str(error)), bytes(16)))
            return
        self._send(peer, self._codec.reply(self._handle(request), nonce))

    def _send(self, peer: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._refuse("unsent", str(error))

    def _refuse(self, reason: str, detail: str) -> None:
        self.refused[reason] += 1
        if self.refused[reason] & (self.refused[reason] - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            logger.warning(
                "%s refused a message (%s; %d of this kind so far)",
                self._what,
                detail,
                self.refused[reason],
            )


class ControlClient:
    """Asks one endpoint. Not for several threads at once."""

    def __init__(self, host: str, port: int, key: bytes | None, timeout: float) -> None:
        self.name = endpoint(host, port)
        self._address = _address(host, port)
        self._timeout = timeout
        self._codec = Codec(key)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None

    def ask(self, request: Request, attempts: int = 2) -> Reply:
        """The reply to ``request``. Every message of the protocol may be sent twice.

        Raises:
            PeerUnreachable: no readable answer within ``attempts`` times the timeout.
        """
        problem = ""
        for _ in range(attempts):
            frame, nonce = self._codec.request(request)
            try:
                socket = self._connect()
                socket.send(frame)
                return self._receive(socket, nonce)
            except WireError as error:
                problem = str(error)
            self.close_socket()
        kind = type(request).__name__.lower()
        raise PeerUnreachable(f"{self.name} did not answer {kind}: {problem}")

    def close(self) -> None:
        """Close the connection."""
        self.close_socket()
        self._context.destroy(0)

    def close_socket(self) -> None:
        """Forget the connection; the next question makes a new one."""
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def _connect(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            try:
                self._socket = self._context.socket(zmq.DEALER)
                self._socket.setsockopt(zmq.LINGER, 0)
                self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY)
                self._socket.setsockopt(zmq.IPV6, int("[" in self._address))
                self._socket.connect(self._address)
            except (zmq.ZMQError, UnicodeError) as error:  # what a stranger sends may be no address
                raise WireError("address", str(error)) from error
        return self._socket

    def _receive(self, socket: zmq.Socket[bytes], nonce: bytes) -> Reply:
        if not socket.poll(int(self._timeout * 1000)):
            raise WireError("silence", f"no answer within {self._timeout:g} s")
        frame = socket.recv()
        try:
            return self._codec.read_reply(frame, nonce)
        except WireError as error:
            if error.reason != "nonce":
                raise
            refusal = self._codec.read_reply(frame, bytes(16))
            raise WireError("refused", getattr(refusal, "reason", "unexpected reply")) from error


def ask_once(
    host: str, port: int, key: bytes | None, timeout: float, request: Request, attempts: int = 2
) -> Reply:
    """The reply to ``request``, over a connection of its own.

    Raises:
        PeerUnreachable: see `ControlClient.ask`.
    """
    with closing(ControlClient(host, port, key, timeout)) as client:
        return client.ask(request, attempts)


def _address(host: str, port: int) -> str:
    return f"tcp://{endpoint(host, port)}"
