"""The contract of a pool's store: whole objects under keys, and how each operation ended, in words.

What holds of every store:

- **Best effort.** An object may be evicted at any time, also between exist() and get(). A key that
  exist() or get() finds has a lease for a few seconds in which it is not evicted; leases are
  counted by the store, not by us, and a lease that ends during a get() makes it LEASE_EXPIRED.
- **Whole or not at all.** An object is seen only after all of its bytes are there, and is never
  changed: a put() of a key that is there leaves the old bytes and says ALREADY_THERE.
- **Each key for itself.** An operation never raises for one key; it returns one outcome a key, in
  the order of the keys. After an outcome that is not ``ok`` the buffers of a get() hold anything.
- **Threads.** All methods may be called from several threads. close() waits for the calls that
  run; a call after it is UNAVAILABLE.
- **Time.** Calls block, some for seconds when the store is gone: never call from the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvpp_core.errors import KvppError

__all__ = [
    "NOT_RUN",
    "Buffer",
    "PoolUnavailable",
    "Store",
    "StoreOutcome",
    "StoreResult",
    "all_ended",
]


class PoolUnavailable(KvppError):
    """The store cannot be asked at all: not connected, gone, stuck, or closed."""


class StoreResult(StrEnum):
    """How an operation on one key ended."""

    STORED = "stored"
    ALREADY_THERE = "already there"
    LOADED = "loaded"
    MISSING = "missing"  # never saved, evicted, or its owner is gone
    WRONG_LENGTH = "wrong length"
    FOREIGN = "foreign object"  # right length, but not what the key promises
    NO_SPACE = "no space"
    NOT_KEPT = "not kept"  # the put was accepted, yet the object is not there
    LEASE_EXPIRED = "lease expired"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"


_OK = (StoreResult.STORED, StoreResult.ALREADY_THERE, StoreResult.LOADED)


@dataclass(frozen=True, slots=True)
class StoreOutcome:
    """The end of one operation on one key."""

    result: StoreResult
    code: int | None = None  # the store's own, where it gave one
    words: str = ""  # what that code means, or what else happened

    @property
    def ok(self) -> bool:
        """Whether the bytes are where they were asked to be."""
        return self.result in _OK

    def __str__(self) -> str:
        code = "" if self.code is None else f" (code {self.code})"
        return f"{self.result}{code}{': ' if self.words else ''}{self.words}"


NOT_RUN = StoreOutcome(StoreResult.FAILED, words="the load ended with an error")


class Buffer(NamedTuple):
    """The memory of one object: pieces in order, which together are the object."""

    addresses: tuple[int, ...]
    sizes: tuple[int, ...]  # bytes

    @property
    def total(self) -> int:
        """Bytes of all pieces."""
        return sum(self.sizes)


class Store(Protocol):
    """A store."""

    @property
    def name(self) -> str:
        """As in the configuration."""

    @property
    def packed(self) -> bool:
        """True: give one piece an object, in registered staging. False: pieces of the caches."""

    def connect(self) -> None:
        """Connect, or do nothing where connected; then make sure that the store answers.

        Raises:
            PoolUnavailable: it cannot be reached; says where and what to do.
        """

    def register(self, address: int, size: int) -> None:
        """Let the store read and write ``size`` bytes at ``address``, now or once it is connected.

        The memory must live until close(). Again is legal.

        Raises:
            KvppError: the store refused the memory; connect() raises it for what was named before.
        """

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key is there now. Grants a lease on those that are.

        Raises:
            PoolUnavailable: the store cannot be asked.
        """

    def put(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        """Store objects: STORED or ALREADY_THERE, else why not."""

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        """Load objects into buffers of exactly their size: LOADED, else why not."""

    def close(self) -> None:
        """Give back everything. Again is legal."""


def all_ended(keys: Sequence[str], outcome: StoreOutcome) -> list[StoreOutcome]:
    """The same outcome for every key."""
    return [outcome] * len(keys)
