"""A backend that does as it is told, and counts: for what no real store does on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvpp_connectors.pool.store.base import (
    Buffer,
    PoolUnavailable,
    StoreOutcome,
    StoreResult,
    all_ended,
)

__all__ = ["ScriptedStore"]


class ScriptedStore:
    """Has ``keys``; fails while ``down``; each exist() goes through ``gate``."""

    name = "scripted"
    packed = True

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self.keys = set(keys)
        self.down: str | None = None
        self.gate: Callable[[], object] = lambda: None
        self.asked: list[list[str]] = []
        self.connects = 0
        self.connected = threading.Event()
        self.closed = False
        self.outcome = StoreOutcome(StoreResult.STORED)

    def connect(self) -> None:
        self.connects += 1
        self._check()
        self.connected.set()

    def register(self, address: int, size: int) -> None:
        assert address and size

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self.asked.append(list(keys))
        self.gate()
        self._check()
        return [key in self.keys for key in keys]

    def put(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        assert len(keys) == len(buffers)
        if self.down is not None:
            return all_ended(keys, StoreOutcome(StoreResult.UNAVAILABLE, -900, self.down))
        return all_ended(keys, self.outcome)

    get = put

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.down is not None:
            raise PoolUnavailable(self.down)
