"""One rank's KV memory in which every byte is known, and a model of what it must hold.

The memory is a view into a larger allocation with sentinel bytes on both sides. A row (one block
of one component) is a pattern that depends on the component, the block, the rank that wrote it and
the generation of the write, and on the place in the row, so that a byte that comes from anywhere
else is seen. The model, ``image``, is changed by hand as the specification says it must change;
`difference` compares the whole allocation with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.layout import SCRATCH_SLOTS, ByteRange, Placement, ScratchPolicy, build_layout
from kvpp_core.ownership import assign_owners

__all__ = [
    "ALIGNED",
    "POISON",
    "UNALIGNED",
    "Model",
    "RankMemory",
    "pattern",
    "uneven_model",
]

UNALIGNED = 333  # sentinel bytes before and after the buffer; odd, so that no word is aligned
ALIGNED = 512
SENTINEL = 0xA5
POISON = 0xFF  # never part of a pattern


class Model(NamedTuple):
    """The caches of one PP stage."""

    bundles: tuple[LayerBundle, ...]
    drafts: tuple[LayerBundle, ...] = ()
    alignment: int = 1  # bytes
    scratch: ScratchPolicy = ScratchPolicy.LARGEST

    def placement(self, ranks: int, rank: int) -> Placement:
        """The model spread over ``ranks`` ranks, seen from ``rank``."""
        owners = assign_owners(self.bundles, ranks)
        return Placement(
            self.bundles, owners, ranks, rank, self.drafts, self.alignment, self.scratch
        )


def uneven_model(layers: int) -> Model:
    """A model as SFA-C8 with LI-C8 lays it out (blocks of 4 tokens), and a draft layer.

    Every third layer has main, indexer and scale, the others have main only.
    """
    bundles = []
    for layer in range(layers):
        components = [Component(f"layers.{layer}.attn", 656 * 4)]
        if layer % 3 == 0:
            components += [
                Component(f"layers.{layer}.indexer.k_cache", 132 * 4),
                Component(f"layers.{layer}.indexer.scale", 4 * 4),
            ]
        bundles.append(LayerBundle(layer, tuple(components)))
    draft = LayerBundle(layers, (Component("mtp.attn", 656 * 4), Component("mtp.indexer", 132 * 4)))
    return Model(tuple(bundles), (draft,))


def pattern(component: str, block: int, writer: int, generation: int, size: int) -> torch.Tensor:
    """The bytes of one row. Values are 0..250: never POISON."""
    seed = zlib.crc32(f"{component}/{block}/{writer}/{generation}".encode())
    start, stride = seed % 251, 1 + (seed >> 8) % 250
    period = ((torch.arange(min(size, 251)) * stride + start) % 251).to(torch.uint8)
    return period.repeat(-(-size // 251))[:size]


class RankMemory:
    """Allocation, buffer (the view that KVPP gets) and image of one rank."""

    def __init__(
        self,
        placement: Placement,
        num_blocks: int,
        guard: int = UNALIGNED,
        device: str = "cpu",
    ) -> None:
        self._guard = guard
        self._on_host = device == "cpu"
        self.placement = placement
        self.num_blocks = num_blocks
        self.layout = build_layout(placement, num_blocks)
        size = guard + self.layout.size + guard
        self._image = torch.full((size,), SENTINEL, dtype=torch.uint8)
        self._image[guard : guard + self.layout.size] = POISON
        self._whole = self._image.to(device, copy=True)
        self.buffer = self._whole[guard : guard + self.layout.size]

    def rows(self, component: Component) -> torch.Tensor:
        """A component of the buffer as (blocks, bytes per block)."""
        span = self.layout.components[component.name]
        return self.buffer[span.offset : span.end].view(-1, component.bytes_per_block)

    def store(self, ordinal: int, generation: int, blocks: Iterable[int] | None = None) -> None:
        """Write an own target bundle, as its layer's computation would, and the image."""
        assert self.placement.owners[ordinal] == self.placement.rank
        blocks = list(range(self.num_blocks) if blocks is None else blocks)
        self._write(self.placement.bundles[ordinal], blocks, self.placement.rank, generation)
        self.expect(ordinal, blocks, generation)

    def store_owned(self, generation: int) -> None:
        """Write every own target bundle."""
        for ordinal in self.placement.owned:
            self.store(ordinal, generation)

    def store_drafts(self, generation: int) -> None:
        """Write this rank's drafts, which differ from the other ranks' drafts."""
        for draft in self.placement.drafts:
            self._write(draft, range(self.num_blocks), self.placement.rank, generation)
            self._imagine(draft, range(self.num_blocks), self.placement.rank, generation)

    def poison_slot(self, slot: int) -> None:
        """Fill a scratch slot with POISON, and the image."""
        span = self.layout.slots[slot]
        self.buffer[span.offset : span.end].fill_(POISON)
        self.expect_poison(slot)

    def expect_poison(self, slot: int) -> None:
        """The image's scratch slot is filled with POISON."""
        self._image_of(self.layout.slots[slot]).fill_(POISON)

    def expect(self, ordinal: int, blocks: Iterable[int], generation: int) -> None:
        """The image gets its owner's bytes in ``blocks`` of a target bundle, and nothing else."""
        bundle, owner = self.placement.bundles[ordinal], self.placement.owners[ordinal]
        self._imagine(bundle, blocks, owner, generation)

    def read(self, ordinal: int, blocks: Sequence[int]) -> list[torch.Tensor]:
        """A copy of ``blocks`` of a target bundle, per component, as attention would read it."""
        index = self._sent(torch.tensor(blocks))
        bundle = self.placement.bundles[ordinal]
        return [self.rows(component).index_select(0, index) for component in bundle.components]

    def wrong(
        self, ordinal: int, blocks: Sequence[int], generation: int, read: Sequence[torch.Tensor]
    ) -> list[str]:
        """What differs between ``read`` and the bytes that the layer's owner wrote."""
        bundle, owner = self.placement.bundles[ordinal], self.placement.owners[ordinal]
        return [
            f"rank {self.placement.rank}: block {block} of {component.name} is {row[:8].tolist()}, "
            f"not what rank {owner} wrote in generation {generation}"
            for component, rows in zip(bundle.components, read, strict=True)
            for block, row in zip(blocks, rows.cpu(), strict=True)
            if not torch.equal(
                row, pattern(component.name, block, owner, generation, component.bytes_per_block)
            )
        ]

    def difference(self, except_slot: int | None = None) -> list[str]:
        """Where the allocation differs from the image, leaving out a slot that is being filled."""
        whole = self._whole.cpu()
        different = whole != self._image
        if except_slot is not None:
            span = self.layout.slots[except_slot]
            different[self._guard + span.offset : self._guard + span.end] = False
        if not bool(different.any()):
            return []
        first = int(different.nonzero()[0])
        return [
            f"rank {self.placement.rank}: {int(different.sum())} wrong bytes; the first at "
            f"{first - self._guard} ({self._place(first - self._guard)}): "
            f"{int(whole[first])}, expected {int(self._image[first])}"
        ]

    def _write(
        self, bundle: LayerBundle, blocks: Iterable[int], writer: int, generation: int
    ) -> None:
        for component in bundle.components:
            rows, size = self.rows(component), component.bytes_per_block
            for block in blocks:
                written = pattern(component.name, block, writer, generation, size)
                rows[block].copy_(self._sent(written))

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device: the copy takes its turn in the current stream."""
        if self._on_host:
            return tensor
        return tensor.pin_memory().to(self._whole.device, non_blocking=True)

    def _imagine(
        self, bundle: LayerBundle, blocks: Iterable[int], writer: int, generation: int
    ) -> None:
        for component in bundle.components:
            size = component.bytes_per_block
            rows = self._image_of(self.layout.components[component.name]).view(-1, size)
            for block in blocks:
                rows[block] = pattern(component.name, block, writer, generation, size)

    def _image_of(self, span: ByteRange) -> torch.Tensor:
        return self._image[self._guard + span.offset : self._guard + span.end]

    def _place(self, offset: int) -> str:
        """What lies at a byte of the buffer, for a message."""
        if not 0 <= offset < self.layout.size:
            return "outside the buffer"
        for slot in range(SCRATCH_SLOTS):
            if self.layout.slots[slot].offset <= offset < self.layout.slots[slot].end:
                return f"scratch slot {slot}"
        return next(
            name
            for name, span in self.layout.components.items()
            if span.offset <= offset < span.end
        )
