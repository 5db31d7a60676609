"""Buffers of known bytes between sentinels."""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Sequence

from kvpp_connectors.pool.store.base import Buffer

__all__ = ["Memory", "bytes_of"]

_GUARD = 37  # bytes of sentinel around each piece
_SENTINEL = 0xA5


def bytes_of(name: str, size: int) -> bytes:
    """``size`` bytes that nobody else has."""
    start = zlib.crc32(name.encode())
    return bytes((start + i * 31) % 251 for i in range(size))


class Memory:
    """Pieces of memory with sentinels around each."""

    def __init__(self, sizes: Sequence[int]) -> None:
        total = sum(sizes) + _GUARD * (len(sizes) + 1)
        self._memory = ctypes.create_string_buffer(bytes([_SENTINEL]) * total, total)
        self._spans: list[tuple[int, int]] = []
        offset = _GUARD
        for size in sizes:
            self._spans.append((offset, size))
            offset += size + _GUARD

    @classmethod
    def holding(cls, data: bytes, pieces: int) -> Memory:
        """Data in as many pieces, of unlike sizes."""
        cuts = [len(data) * i * i // (pieces * pieces) for i in range(pieces + 1)]
        memory = cls([end - start for start, end in itertools.pairwise(cuts)])
        for (offset, size), start in zip(memory._spans, cuts, strict=False):
            place = ctypes.addressof(memory._memory) + offset
            ctypes.memmove(place, data[start : start + size], size)
        return memory

    @property
    def buffer(self) -> Buffer:
        base = ctypes.addressof(self._memory)
        return Buffer(
            tuple(base + offset for offset, _ in self._spans),
            tuple(size for _, size in self._spans),
        )

    @property
    def data(self) -> bytes:
        """The pieces together; fails if anything around them was written."""
        raw = self._memory.raw
        end, pieces = 0, []
        for offset, size in self._spans:
            assert set(raw[end:offset]) == {_SENTINEL}, "written before a piece"
            pieces.append(raw[offset : offset + size])
            end = offset + size
        assert set(raw[end:]) == {_SENTINEL}, "written behind the last piece"
        return b"".join(pieces)
