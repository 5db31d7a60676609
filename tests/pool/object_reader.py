"""Reads a store's objects by docs/pool.md alone: with none of the code that wrote them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

__all__ = ["HEADER", "Component", "read_object"]

HEADER = 64  # bytes


@dataclass(frozen=True, slots=True)
class Component:
    """One cache of one layer: the layer as keys write it, the cache's name, bytes a block."""

    layer: str  # t3, d6
    name: str
    size: int


def read_object(key: str, data: bytes, components: Sequence[Component]) -> list[bytes]:
    """The bytes of each component, once all that the object says of itself is true."""
    length = data[0]
    magic, version, payload, mark, inventory = msgspec.msgpack.decode(data[1 : 1 + length])
    assert data[1 + length : HEADER] == bytes(HEADER - 1 - length), "padding"
    assert (magic, version) == ("kvpp", 1)
    assert payload == len(data) - HEADER == sum(component.size for component in components)
    assert mark == hashlib.blake2b(key.encode(), digest_size=16).digest(), "saved for another key"
    text = ";".join(f"{c.layer}:{c.name}:{c.size}" for c in components)
    assert inventory == hashlib.sha256(text.encode()).digest()[:8], "other components"
    pieces, start = [], HEADER
    for component in components:
        pieces.append(data[start : start + component.size])
        start += component.size
    return pieces
