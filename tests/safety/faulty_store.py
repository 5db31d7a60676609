"""A pool's real backend with faults on its way: held, lost, failed, doubled, reordered moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvpp_connectors.pool.store.base import Buffer, Store, StoreOutcome, StoreResult

__all__ = ["Fault", "FaultyStore", "Move", "What"]

What = Literal["hold", "fail", "raise", "drop", "twice", "reverse"]
Move = Literal["put", "get"]
_PATIENCE = 30.0  # seconds

_Call = Callable[[Sequence[str], Sequence[Buffer]], list[StoreOutcome]]


@dataclass(slots=True)
class Fault:
    """What happens to calls that move a key with ``part`` in it.

    ``hold``: the call waits until `open`. ``fail``: those keys are not moved, and that is said.
    ``raise``: the call ends with an error that no backend should raise. ``drop``: they are not
    moved, and the store says that they were. ``twice``: the call is made twice. ``reverse``: its
    keys are moved last to first.
    """

    what: What
    move: Move
    part: str
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def open(self) -> None:
        """Let calls through that are held."""
        self.opened.set()


class FaultyStore:
    """A Store over one that is somebody else's to close."""

    def __init__(self, backend: Store) -> None:
        self._backend = backend
        self._faults: list[Fault] = []
        self.name, self.packed = backend.name, backend.packed
        self.connect, self.register = backend.connect, backend.register
        self.exist = backend.exist

    def inject(self, what: What, move: Move, part: str = "") -> Fault:
        """From now on."""
        self._faults.append(Fault(what, move, part))
        return self._faults[-1]

    def heal(self) -> None:
        """No fault from now on; what is held goes on."""
        for fault in self._faults:
            fault.open()
        self._faults = []

    def close(self) -> None:
        """See Store."""

    def put(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        """See Store."""
        return self._move("put", self._backend.put, keys, buffers)

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        """See Store."""
        return self._move("get", self._backend.get, keys, buffers)

    def _move(
        self, move: Move, call: _Call, keys: Sequence[str], buffers: Sequence[Buffer]
    ) -> list[StoreOutcome]:
        for fault in self._faults:
            if fault.move == move and any(fault.part in key for key in keys):
                call = _with(fault, call)
        return call(keys, buffers)


def _with(fault: Fault, call: _Call) -> _Call:
    def faulty(keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        fault.reached.set()
        if fault.what == "hold":
            assert fault.opened.wait(_PATIENCE)
            return call(keys, buffers)
        if fault.what == "raise":
            raise ArithmeticError("injected")
        if fault.what == "twice":
            call(keys, buffers)
            return call(keys, buffers)
        if fault.what == "reverse":
            return call(keys[::-1], buffers[::-1])[::-1]
        lie = StoreResult.STORED if fault.move == "put" else StoreResult.LOADED
        said = StoreOutcome(lie if fault.what == "drop" else StoreResult.FAILED, words="injected")
        kept = [i for i, key in enumerate(keys) if fault.part not in key]
        moved = call([keys[i] for i in kept], [buffers[i] for i in kept]) if kept else []
        outcomes = dict(zip(kept, moved, strict=True))
        return [outcomes.get(i, said) for i in range(len(keys))]

    return faulty
