"""Saving and loading blocks as objects of a pool: header, payload, bounded staging.

Packed (tcp): header and payload lie in one piece of staging memory. Otherwise the header lies in
staging memory and the payload's pieces where the caches have them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from kvpp_connectors.connector.transfer_engine import ALIGNMENT
from kvpp_connectors.pool.keys import FORMAT_VERSION
from kvpp_connectors.pool.packing import CacheBlocks, Inventory, record_event
from kvpp_connectors.pool.store.base import (
    Buffer,
    PoolUnavailable,
    Store,
    StoreOutcome,
    StoreResult,
)
from kvpp_core.errors import KvppError
from kvpp_core.transfer import allocate_staging

__all__ = [
    "HEADER_BYTES",
    "BlockObject",
    "BlockStore",
    "CommitMarks",
    "NothingKept",
    "Staging",
    "read_header",
    "write_header",
]

HEADER_BYTES = 64
_MOST_OBJECTS = 512  # in one call: enough for its cost to vanish, few enough to stop between calls
_MAGIC = "kvpp"
_NOTHING = Inventory(()).digest()  # of a commit marker


class BlockObject(NamedTuple):
    """An object and the block whose bytes it holds."""

    key: str
    block: int


class Header(msgspec.Struct, array_like=True, frozen=True):
    """What an object says of itself, so that another's bytes are never taken for it."""

    magic: str
    version: int
    payload_bytes: int
    key: bytes  # 16 bytes of the key's digest
    inventory: bytes  # Inventory.digest


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Header)


def write_header(key: str, payload_bytes: int, inventory: bytes) -> bytes:
    """64 bytes: the length of the header in one byte, the header in MessagePack, zeros."""
    mark = hashlib.blake2b(key.encode(), digest_size=16).digest()
    encoded = _ENCODER.encode(Header(_MAGIC, FORMAT_VERSION, payload_bytes, mark, inventory))
    return bytes([len(encoded)]) + encoded.ljust(HEADER_BYTES - 1, b"\0")


def read_header(data: bytes, key: str, payload_bytes: int, inventory: bytes) -> str | None:
    """What is wrong with a header for this key, or None."""
    if data == write_header(key, payload_bytes, inventory):
        return None
    try:
        found = _DECODER.decode(data[1 : 1 + data[0]])
    except msgspec.MsgspecError as error:
        return f"it does not begin with a header of ours: {error}"
    if found.magic != _MAGIC or found.version != FORMAT_VERSION:
        return f"it is of format {found.magic!r} {found.version}; expected {FORMAT_VERSION}"
    if found.payload_bytes != payload_bytes:
        return f"it says {found.payload_bytes:,} bytes of payload; expected {payload_bytes:,}"
    if found.inventory != inventory:
        return (
            f"it holds other layers or components (inventory {found.inventory.hex()}; expected "
            f"{inventory.hex()})"
        )
    return "it was saved under another key"


class Staging:
    """Memory that a store reads and writes: at most ``capacity`` bytes, used by one thread."""

    def __init__(self, store: Store, capacity: int, device: torch.device | str = "cpu") -> None:
        """Allocate and register it.

        Raises:
            KvppError: the store refused the memory.
        """
        place = torch.device(device)
        self._memory = allocate_staging(capacity, place, ALIGNMENT if place.type == "npu" else 1)
        self.capacity = capacity
        if capacity:
            store.register(self._memory.data_ptr(), capacity)

    def rows(self, row_bytes: int) -> torch.Tensor:
        """As many rows as fit: uint8 (rows, row_bytes).

        Raises:
            KvppError: not even one fits.
        """
        count = self.capacity // row_bytes
        if not count:
            raise KvppError(
                f"staging of {self.capacity:,} bytes does not hold one object of {row_bytes:,} "
                "bytes; raise staging_bytes"
            )
        return self._memory[: count * row_bytes].view(count, row_bytes)


class BlockStore:
    """Saves and loads one inventory's objects. For one thread; several may share a store."""

    def __init__(self, store: Store, blocks: CacheBlocks, staging: Staging) -> None:
        """Bind the caches; without packing they are registered with the store.

        Raises:
            KvppError: staging is too small for one object, or the store refused the caches.
        """
        self._store = store
        self._blocks = blocks
        self._inventory = blocks.inventory.digest()
        self._payload_bytes = blocks.inventory.payload_bytes
        row_bytes = HEADER_BYTES + (self._payload_bytes if store.packed else 0)
        self._rows = staging.rows(row_bytes)[:_MOST_OBJECTS]
        if not store.packed:
            for address, size in blocks.storages():
                store.register(address, size)

    @property
    def object_bytes(self) -> int:
        """Bytes of one object, header included."""
        return HEADER_BYTES + self._payload_bytes

    def save(
        self, objects: Sequence[BlockObject], copied: Callable[[], object] = lambda: None
    ) -> list[StoreOutcome]:
        """Save the blocks that the store lacks, one outcome each.

        It is asked first: what it has is neither packed nor sent. The blocks must not change until
        ``copied`` is called, at the latest when this returns.
        """
        outcomes: list[StoreOutcome] = []
        batches = self._batches(objects)
        for number, batch in enumerate(batches, start=1):
            lacking = self._lacking(batch)
            rows = self._rows[: len(lacking)]
            if lacking:
                headers = [
                    write_header(o.key, self._payload_bytes, self._inventory) for o in lacking
                ]
                rows[:, :HEADER_BYTES].copy_(_as_tensor(headers))
            if self._store.packed:
                if lacking:
                    self._blocks.gather([o.block for o in lacking], rows[:, HEADER_BYTES:])
                if number == len(batches):
                    copied()
            elif lacking:
                _complete(rows)  # the headers; what is gathered is complete
            ended = dict.fromkeys(batch, StoreOutcome(StoreResult.ALREADY_THERE))
            if lacking:
                stored = self._store.put([o.key for o in lacking], self._buffers(lacking))
                ended.update(zip(lacking, stored, strict=True))
            outcomes += [ended[o] for o in batch]
        return outcomes

    def load(self, objects: Sequence[BlockObject]) -> list[StoreOutcome]:
        """Load blocks, one outcome each. A block whose outcome is not ``ok`` holds anything."""
        outcomes: list[StoreOutcome] = []
        for batch in self._batches(objects):
            rows = self._rows[: len(batch)]
            rows[:, :HEADER_BYTES].zero_()
            _complete(rows)  # else it could come after what the store writes there
            ended = self._store.get([o.key for o in batch], self._buffers(batch))
            headers = rows[:, :HEADER_BYTES].cpu().numpy()
            checked = [
                self._checked(outcome, o.key, header.tobytes())
                for outcome, o, header in zip(ended, batch, headers, strict=True)
            ]
            if self._store.packed:
                good = [i for i, outcome in enumerate(checked) if outcome.ok]
                self._scatter(batch, rows, good)
            outcomes += checked
        return outcomes

    def _lacking(self, batch: Sequence[BlockObject]) -> list[BlockObject]:
        """Those that the store does not have; all of them where it cannot be asked: put() says why
        then."""
        try:
            there = self._store.exist([o.key for o in batch])
        except PoolUnavailable:
            return list(batch)
        return [o for o, found in zip(batch, there, strict=True) if not found]

    def _batches(self, objects: Sequence[BlockObject]) -> list[Sequence[BlockObject]]:
        size = len(self._rows)
        return [objects[start : start + size] for start in range(0, len(objects), size)]

    def _buffers(self, batch: Sequence[BlockObject]) -> list[Buffer]:
        start, step = self._rows.data_ptr(), self._rows.stride(0)
        headers = [start + i * step for i in range(len(batch))]
        if self._store.packed:
            return [Buffer((address,), (self.object_bytes,)) for address in headers]
        found = [self._blocks.segments(o.block) for o in batch]
        return [
            Buffer((header, *segments.addresses), (HEADER_BYTES, *segments.sizes))
            for header, segments in zip(headers, found, strict=True)
        ]

    def _scatter(
        self, batch: Sequence[BlockObject], rows: torch.Tensor, good: Sequence[int]
    ) -> None:
        if not good:
            return
        payloads = rows[:, HEADER_BYTES:]
        if len(good) < len(batch):
            payloads = payloads[torch.tensor(good)]
        self._blocks.scatter(payloads, [batch[i].block for i in good])

    def _checked(self, outcome: StoreOutcome, key: str, header: bytes) -> StoreOutcome:
        if not outcome.ok:
            return outcome
        wrong = read_header(header, key, self._payload_bytes, self._inventory)
        return outcome if wrong is None else StoreOutcome(StoreResult.FOREIGN, words=wrong)


class NothingKept:
    """In place of a BlockStore on a rank that keeps no bytes of any block."""

    object_bytes = 0

    def save(
        self, objects: Sequence[BlockObject], copied: Callable[[], object] = lambda: None
    ) -> list[StoreOutcome]:
        """Nothing to save."""
        copied()
        return [StoreOutcome(StoreResult.ALREADY_THERE)] * len(objects)

    def load(self, objects: Sequence[BlockObject]) -> list[StoreOutcome]:
        """Nothing to wait for."""
        return [StoreOutcome(StoreResult.LOADED)] * len(objects)


class CommitMarks:
    """Marks: objects that are a header alone. For the thread that owns the staging."""

    def __init__(self, store: Store, staging: Staging) -> None:
        self._store, self._staging = store, staging

    def there(self, keys: Sequence[str]) -> set[str]:
        """Those that the store has; none where it cannot be asked: saves say why then."""
        try:
            return {key for key, found in zip(keys, self._store.exist(keys), strict=True) if found}
        except PoolUnavailable:
            return set()

    def save(self, keys: Sequence[str]) -> list[StoreOutcome]:
        """Save marks, one outcome each."""
        whole = self._staging.rows(HEADER_BYTES)[:_MOST_OBJECTS]
        outcomes: list[StoreOutcome] = []
        for start in range(0, len(keys), len(whole)):
            batch = keys[start : start + len(whole)]
            rows = whole[: len(batch)]
            rows.copy_(_as_tensor([write_header(key, 0, _NOTHING) for key in batch]))
            _complete(rows)
            base = rows.data_ptr()
            buffers = [
                Buffer((base + i * HEADER_BYTES,), (HEADER_BYTES,)) for i in range(len(batch))
            ]
            outcomes += self._store.put(batch, buffers)
        return outcomes


def _complete(staged: torch.Tensor) -> None:
    """Wait for what this thread has done to staging memory: the store reads and writes it by other
    ways than the device's stream."""
    if (done := record_event(staged.device)) is not None:
        done.synchronize()


def _as_tensor(headers: Sequence[bytes]) -> torch.Tensor:
    joined = bytearray(b"".join(headers))
    return torch.frombuffer(joined, dtype=torch.uint8).view(len(headers), HEADER_BYTES)
