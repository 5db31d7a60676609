"""Seams of a worker for tests of the pool: hold its calls into the store, and write down in which
order a layer is loaded, broadcast and read.

Workers answer no call while they run a step. So a gate is opened by a file, and what they do is
written to a file, a line each: monotonic nanoseconds, rank, what, layer.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine.faults import WorkerFaults
from tests.pool.master import wait_until

__all__ = ["EXTENSION", "Event", "Gate", "StoreFaults"]

EXTENSION = f"{__name__}.StoreFaults"
_HELD_S = 120.0  # then a gate that nobody opens is an error


class Event(NamedTuple):
    """A line of the file."""

    at: int
    rank: int
    what: str
    layer: int  # -1: of no layer


@dataclass(frozen=True)
class Gate:
    """A folder with what the workers wrote, and the file that opens the gate."""

    folder: Path

    def open(self) -> None:
        """Let everybody through, from now on."""
        (self.folder / "open").touch()

    @property
    def is_open(self) -> bool:
        """Whether everybody gets through."""
        return (self.folder / "open").exists()

    def write(self, rank: int, what: str, layer: int = -1) -> None:
        """Add a line."""
        line = f"{time.monotonic_ns()} {rank} {what} {layer}\n"
        file = os.open(self.folder / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)

    def of(self, layer: int, what: str | None = None) -> list[Event]:
        """What was written of a layer until now, in order of time."""
        path = self.folder / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        fields = [line.split(" ") for line in lines]
        found = [Event(int(at), int(rank), name, int(of)) for at, rank, name, of in fields]
        return sorted(e for e in found if e.layer == layer and what in (None, e.what))

    def is_reached(self) -> bool:
        """Whether somebody stands before it, or did."""
        return bool(self.of(-1, "held"))

    def pass_through(self, rank: int, layer: int = -1) -> None:
        """The worker's end: say "held", and wait until the gate is open."""
        if not self.is_open:
            self.write(rank, "held", layer)
            wait_until(lambda: self.is_open, _HELD_S, "the opening of the gate")


class StoreFaults(WorkerFaults):
    """Methods that a test calls through ``collective_rpc``. ``self`` is the worker."""

    def fault_hold_store(self, folder: Path, operation: str, keys: str) -> None:
        """Hold each get or put with a key that matches ``keys``, until the test opens the gate."""
        gate, backend, rank = Gate(folder), self._store(), self._rank()
        original = getattr(type(backend), operation)

        def held(names: Sequence[str], buffers: Any) -> Any:
            if any(re.search(keys, name) for name in names):
                gate.pass_through(rank)
            return original(backend, names, buffers)

        setattr(backend, operation, held)

    def fault_release_store(self, _: Any = None) -> None:
        """Let the store be as it was."""
        for operation in ("get", "put"):
            vars(self._store()).pop(operation, None)

    def fault_hold_layer(self, folder: Path, layer: int) -> None:
        """Hold the load of a layer where it is owned, and write down what is done to each layer."""
        gate = Gate(folder)
        rank, backend = self._rank(), self._store()
        pipeline = self._kvpp.driver.pipeline  # type: ignore[attr-defined]
        get, acquire, stream = type(backend).get, type(pipeline).acquire, pipeline._transfer._stream
        layer_of = self._kvpp.driver._layer_of  # type: ignore[attr-defined]

        def held(names: Sequence[str], buffers: Any) -> Any:
            of_layer = [
                int(found[1]) for name in names if (found := re.search("@t([0-9]+)$", name))
            ]
            if layer in of_layer:
                gate.pass_through(rank, layer)
            outcomes = get(backend, names, buffers)
            if of_layer:
                gate.write(rank, "loaded", of_layer[0])
            return outcomes

        def watched_acquire(component: str) -> None:
            gate.write(rank, "wanted", layer_of[component])
            acquire(pipeline, component)
            gate.write(rank, "readable", layer_of[component])

        def collective(launch: Callable[[], Any], what: str) -> None:
            of_layer = int(what.split("layer ")[1].split(" ")[0])
            owner = what.endswith(f"from rank {rank}")

            def launched() -> Any:
                gate.write(rank, "sent" if owner else "awaited", of_layer)
                return launch()

            type(stream).collective(stream, launched, what)

        backend.get, pipeline.acquire, stream.collective = held, watched_acquire, collective

    def fault_prefetch(self, layers: int) -> None:
        """Submit loads so many layers ahead, as if the engine had been configured so."""
        self._pool()._worker._mode._prefetch = layers

    def _rank(self) -> int:
        rank: int = self.rank  # type: ignore[attr-defined]
        return rank

    def _pool(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def _store(self) -> Any:
        return self._pool()._store
