"""TCP relays between decode and prefill, which pass bytes on, hold them back or swallow them.

A `Detour` puts one on every connection of a transfer: to the lease endpoint, to the workers'
control endpoints, to their transfer engines' handshake ports and data ports. Each learns the next
one's place from what passes through it and names a relay instead: ports have five digits, so that
no message changes its length.
"""

from __future__ import annotations

import contextlib
import copy
import re
import socket
import threading
from collections.abc import Callable
from typing import Any, Literal

from tests.p2p.sides import PATIENCE

__all__ = ["Detour", "Direction", "Relay"]

HOST = "127.0.0.1"


class Direction:
    """What becomes of the bytes that flow one way, on all connections of a relay."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._mode: Literal["pass", "hold", "swallow"] = "pass"
        self._left = 0  # bytes that still pass
        self.age = 0  # connections that are older lose everything
        self.held = self.swallowed = 0  # chunks

    def pass_on(self) -> None:
        """Deliver what is held, and what comes."""
        self._set("pass", 0)

    def hold(self) -> None:
        """Keep what comes until `pass_on`."""
        self._set("hold", 0)

    def swallow(self, after: int = 0) -> None:
        """Let ``after`` more bytes through; a connection that lost some loses all that follow."""
        self._set("swallow", after)

    def cut_off(self) -> None:
        """Swallow what comes on the connections that there are; new ones are not concerned."""
        self.age += 1

    def admits(self, count: int) -> bool:
        """Whether that many bytes may pass, which may take a while."""
        with self._changed:
            if self._mode == "hold":
                self.held += 1
                assert self._changed.wait_for(lambda: self._mode != "hold", PATIENCE)
            if self._mode == "swallow" and self._left < count:
                self.swallowed += 1
                return False
            self._left -= count
            return True

    def _set(self, mode: Literal["pass", "hold", "swallow"], left: int) -> None:
        with self._changed:
            self._mode, self._left = mode, left
            self._changed.notify_all()


class Relay:
    """Listens on a free port of loopback and passes everything on to another one."""

    def __init__(self, target: int, rewrite: Callable[[bytes], bytes] = lambda data: data) -> None:
        """``rewrite`` sees what the target answers, and may change but not lengthen it."""
        self._target, self._rewrite = target, rewrite
        self.questions, self.answers = Direction(), Direction()
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        self._open: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End it and every connection through it."""
        self.questions.pass_on()
        self.answers.pass_on()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                far = socket.socket()
                self._open += [near, far]
                try:
                    far.connect((HOST, self._target))
                except OSError:
                    near.close()
                    continue
                for pump in (
                    (near, far, self.questions, lambda data: data),
                    (far, near, self.answers, self._rewrite),
                ):
                    threading.Thread(target=_pump, args=pump, daemon=True).start()


def _pump(
    source: socket.socket,
    target: socket.socket,
    direction: Direction,
    rewrite: Callable[[bytes], bytes],
) -> None:
    lost, age = False, direction.age
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            lost = lost or age < direction.age or not direction.admits(len(data))
            if not lost:
                target.sendall(rewrite(data))
        target.shutdown(socket.SHUT_WR)


class Detour:
    """Relays for all that decode says to one prefill engine, and all that it hears from it."""

    def __init__(self, params: dict[str, Any]) -> None:
        """``params`` are kv_transfer_params of the prefill engine."""
        self.lease = Relay(params["remote_port"])
        workers = params["kvpp"]["workers"]
        self.workers = [Relay(worker["port"], self._name_handshake) for worker in workers]
        self.data: list[Relay] = []  # known after the first transfer
        self._handshakes: list[Relay] = []

    def through(self, params: dict[str, Any]) -> dict[str, Any]:
        """The same kv_transfer_params, which lead through the relays."""
        changed = copy.deepcopy(params)
        changed["remote_port"] = self.lease.port
        for worker, relay in zip(changed["kvpp"]["workers"], self.workers, strict=True):
            worker["port"] = relay.port
        return changed

    def close(self) -> None:
        """End all relays."""
        for relay in (self.lease, *self.workers, *self._handshakes, *self.data):
            relay.close()

    def _name_handshake(self, description: bytes) -> bytes:
        """Put a relay in the place of the transfer engine's session."""
        return self._redirect(
            rb"(127\.0\.0\.1:)(\d{5})", description, self._handshakes, self._name_data
        )

    def _name_data(self, segment: bytes) -> bytes:
        """Put a relay in the place of the transfer engine's data port."""
        return self._redirect(rb'("tcp_data_port":)(\d{5})', segment, self.data, lambda data: data)

    @staticmethod
    def _redirect(
        pattern: bytes, data: bytes, relays: list[Relay], rewrite: Callable[[bytes], bytes]
    ) -> bytes:
        def replace(found: re.Match[bytes]) -> bytes:
            relays.append(Relay(int(found[2]), rewrite))
            return found[1] + str(relays[-1].port).encode()

        return re.sub(pattern, replace, data)
