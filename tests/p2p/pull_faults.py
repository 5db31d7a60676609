"""Seams of a decode worker for tests: hold its pull at a defined point, and look at its reads."""

from __future__ import annotations

import itertools
import threading
from typing import Any, Literal
from unittest import mock

from kvpp_connectors.connector.process import process_engine
from kvpp_connectors.connector.transfer_engine import Read
from kvpp_connectors.p2p.protocol import Confirm, Reply, Request
from kvpp_connectors.p2p.rpc import ControlClient
from tests.engine.faults import WorkerFaults
from tests.p2p.sides import PATIENCE

__all__ = ["EXTENSION", "PullFaults"]

EXTENSION = f"{__name__}.PullFaults"


class Gate:
    """Lets some through and holds who comes next, until it is opened."""

    def __init__(self, after: int) -> None:
        self._after, self._numbers = after, itertools.count()
        self._open = threading.Event()
        self.held = False

    @property
    def is_open(self) -> bool:
        """Whether everybody gets through."""
        return self._open.is_set()

    def open(self) -> None:
        """Let everybody through."""
        self._open.set()
        self.held = False

    def go_through(self) -> None:
        """Wait, if it is one's turn to."""
        if next(self._numbers) == self._after and not self.is_open:
            self.held = True
            assert self._open.wait(4 * PATIENCE)


class PullFaults(WorkerFaults):
    """Methods that a test calls through ``collective_rpc``."""

    def fault_hold(self, what: Literal["read", "confirm"], after: int) -> None:
        """Hold a pull before its read number ``after`` (from 0), or before it confirms."""
        self._gate = Gate(after if what == "read" else 0)
        if what == "read":
            self._watch_reads(self._gate)
        else:
            self._watch_confirmations(self._gate)

    def fault_let_go(self, _: Any = None) -> None:
        """Let the pull that is held go on, if there is one."""
        gate: Gate | None = getattr(self, "_gate", None)
        if gate is not None:
            gate.open()

    def observe_held(self, _: Any = None) -> bool:
        """Whether a pull is held."""
        return self._gate.held

    def observe_in_flight(self, _: Any = None) -> int:
        """Reads that were submitted after `fault_let_go` and have not ended."""
        return len(self._in_flight)

    def _watch_reads(self, gate: Gate) -> None:
        engine = process_engine("127.0.0.1", "tcp")
        in_flight = self._in_flight = set[int]()

        def start_read(read: Read) -> int | None:
            gate.go_through()
            handle = type(engine).start_read(engine, read)
            if handle is not None and gate.is_open:
                in_flight.add(handle)
            return handle

        def poll(handle: int) -> bool | None:
            state = type(engine).poll(engine, handle)
            if state is not None:
                in_flight.discard(handle)
            return state

        mock.patch.multiple(engine, start_read=start_read, poll=poll).start()

    @staticmethod
    def _watch_confirmations(gate: Gate) -> None:
        original = ControlClient.ask

        def ask(self: ControlClient, request: Request, attempts: int = 2) -> Reply:
            if isinstance(request, Confirm):
                gate.go_through()
            return original(self, request, attempts)

        mock.patch.object(ControlClient, "ask", ask).start()
