"""A worker's caches in an arena in which every byte is known, and an image of what it must hold.

An arena is one allocation that lives as long as its transfer engine, which registers it once; each
test lays its caches out in it anew. What is no cache (before, between and after them) is sentinel.
A row of a cache says which component, block, writer and generation it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvpp_core.layout import Placement, build_layout
from tests.core.rank_memory import POISON, SENTINEL, pattern

__all__ = ["ARENA", "KvMemory", "Row", "laid_out", "new_arena"]

ARENA = 1 << 19  # bytes


@dataclass(frozen=True)
class Row:
    """A component's block i is ``block_bytes`` at ``offset + i * stride`` of the arena."""

    offset: int
    stride: int
    block_bytes: int


def new_arena() -> torch.Tensor:
    """The memory of one worker."""
    return torch.full((ARENA,), SENTINEL, dtype=torch.uint8)


def laid_out(placement: Placement, num_blocks: int, guard: int, interleaved: bool) -> KvMemory:
    """Caches by the layout of KVPP, or with all components of a block side by side."""
    rows, end = {}, guard
    if interleaved:
        bundles = [*(placement.bundles[i] for i in placement.owned), *placement.drafts]
        components = [component for bundle in bundles for component in bundle.components]
        gap = 16  # so that a row that is too long is seen
        stride = sum(component.bytes_per_block + gap for component in components)
        for component in components:
            rows[component.name] = Row(end, stride, component.bytes_per_block)
            end += component.bytes_per_block + gap
        return KvMemory(rows, num_blocks)
    layout = build_layout(placement, num_blocks)
    for bundle in (*placement.bundles, *placement.drafts):
        for component in bundle.components:
            size = component.bytes_per_block
            rows[component.name] = Row(guard + layout.components[component.name].offset, size, size)
    return KvMemory(rows, num_blocks)


class KvMemory:
    """Caches in an arena. Bytes are POISON until they are written."""

    def __init__(self, rows: dict[str, Row], num_blocks: int) -> None:
        self.rows = rows
        self.num_blocks = num_blocks
        self._arena = torch.empty(0)
        self._image = torch.empty(0)

    def use(self, arena: torch.Tensor) -> None:
        """Take over an arena."""
        self._arena = arena
        self.reset()

    def reset(self) -> None:
        """Forget everything that was written."""
        self._arena.fill_(SENTINEL)
        for name in self.rows:
            self.of(name).fill_(POISON)
        self._image = self._arena.clone()

    def of(self, name: str) -> torch.Tensor:
        """A component as (blocks, bytes per block)."""
        return self._view(self._arena, name)

    def cache(self, name: str, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A component as an engine keeps it: (blocks, tokens, 1, elements)."""
        cache = self.of(name).view(dtype)
        return cache.view(self.num_blocks, 4, 1, cache.shape[1] // 4)

    def write(self, name: str, writer: int, generation: int) -> None:
        """Fill a component, as the forward passes of ``writer`` would."""
        for block in range(self.num_blocks):
            self._put(self._arena, name, block, (name, block, writer, generation))
            self._put(self._image, name, block, (name, block, writer, generation))

    def overwrite(self, blocks: Iterable[int], writer: int, generation: int) -> None:
        """Another request's KV in ``blocks`` of all components."""
        for block in blocks:
            for name in self.rows:
                self._put(self._arena, name, block, (name, block, writer, generation))

    def expect(
        self,
        name: str,
        local: Sequence[int],
        remote: Sequence[int],
        writers: Iterable[int],
        generation: int,
    ) -> None:
        """Block local[i] must hold what one of ``writers`` wrote to its block remote[i].

        All blocks must come from the same one.
        """
        first, size = self.of(name)[local[0]], self.rows[name].block_bytes
        found = {
            writer
            for writer in writers
            if torch.equal(first, pattern(name, remote[0], writer, generation, size))
        }
        assert len(found) == 1, f"block {remote[0]} of {name} of {writers}: {first[:8].tolist()}"
        writer = found.pop()
        for mine, theirs in zip(local, remote, strict=True):
            self._put(self._image, name, mine, (name, theirs, writer, generation))

    def difference(self) -> list[str]:
        """Where the arena is not as its image."""
        places = (self._arena != self._image).nonzero().flatten().tolist()
        return [f"{len(places)} wrong bytes, the first {self._place(places[0])}"] if places else []

    def _put(
        self, target: torch.Tensor, name: str, block: int, said: tuple[str, int, int, int]
    ) -> None:
        self._view(target, name)[block] = pattern(*said, self.rows[name].block_bytes)

    def _view(self, target: torch.Tensor, name: str) -> torch.Tensor:
        row = self.rows[name]
        return target.as_strided((self.num_blocks, row.block_bytes), (row.stride, 1), row.offset)

    def _place(self, at: int) -> str:
        for name, row in self.rows.items():
            block, byte = divmod(at - row.offset, row.stride)
            if 0 <= block < self.num_blocks and byte < row.block_bytes:
                return f"in block {block} of {name}"
        return f"at {at}, outside all caches"
