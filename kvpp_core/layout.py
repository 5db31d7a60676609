"""Where every byte of a rank's KV memory lies.

Sections 2.1 and 2.2 of the specification. One buffer per rank:

    [ scratch slot 0 | scratch slot 1 | owned bundles ... | draft bundles ... ]

Inside a bundle the components follow each other, and each component holds all logical blocks, so
that a bundle is one contiguous span and can be broadcast as one message. A bundle that this rank
does not own lies in scratch slot (target ordinal % 2). ONE builder serves the budget
(``num_blocks=1``) and the allocation (the final ``num_blocks``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from kvpp_core.bundles import LayerBundle, largest_bytes_per_block
from kvpp_core.errors import PlanError

__all__ = ["SCRATCH_SLOTS", "ByteRange", "Placement", "RankLayout", "ScratchPolicy", "build_layout"]

SCRATCH_SLOTS = 2  # the current layer and the next one


class ScratchPolicy(StrEnum):
    """How large the scratch slots are."""

    LARGEST = "largest"  # the specification: the stage's largest target bundle, both of them
    FITTED = "fitted"  # the largest bundle that this rank ever receives into the slot


class ByteRange(NamedTuple):
    """A byte range of the rank's buffer."""

    offset: int  # bytes from the start of the buffer
    size: int  # bytes

    @property
    def end(self) -> int:
        """First byte after the span."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class Placement:
    """Who keeps what in one group, seen from one rank. Does not depend on the block count.

    ``owners[i]`` is the group rank that keeps ``bundles[i]``; ``drafts`` are the draft layers
    that this rank keeps whole (section 2.1: outside the partition and outside scratch).
    """

    bundles: tuple[LayerBundle, ...]
    owners: tuple[int, ...]
    ranks: int
    rank: int
    drafts: tuple[LayerBundle, ...] = ()
    alignment: int = 1  # bytes; every bundle starts at a multiple of this
    scratch: ScratchPolicy = ScratchPolicy.LARGEST

    def __post_init__(self) -> None:
        if len(self.owners) != len(self.bundles):
            raise PlanError(f"{len(self.bundles)} bundles but {len(self.owners)} owners")
        if not 0 <= self.rank < self.ranks:
            raise PlanError(f"rank {self.rank} is not in a group of {self.ranks}")
        if any(not 0 <= owner < self.ranks for owner in self.owners):
            raise PlanError(f"owners {self.owners} name a rank outside a group of {self.ranks}")
        if self.alignment <= 0:
            raise PlanError(f"alignment of {self.alignment} bytes; expected a positive number")

    @property
    def owned(self) -> tuple[int, ...]:
        """Ordinals of the bundles that this rank keeps."""
        return tuple(i for i, owner in enumerate(self.owners) if owner == self.rank)

    @property
    def slot_bytes_per_block(self) -> tuple[int, ...]:
        """Bytes per block of each scratch slot."""
        if self.scratch is ScratchPolicy.LARGEST:
            return (largest_bytes_per_block(self.bundles),) * SCRATCH_SLOTS
        received = [(i, b) for i, b in enumerate(self.bundles) if self.owners[i] != self.rank]
        return tuple(
            max((b.bytes_per_block for i, b in received if i % SCRATCH_SLOTS == slot), default=0)
            for slot in range(SCRATCH_SLOTS)
        )

    @property
    def physical_bytes_per_block(self) -> int:
        """Section 2.2: owned bundles + drafts + two scratch slots, without alignment padding."""
        return (
            sum(self.bundles[i].bytes_per_block for i in self.owned)
            + sum(draft.bytes_per_block for draft in self.drafts)
            + sum(self.slot_bytes_per_block)
        )

    @property
    def logical_bytes_per_block(self) -> int:
        """Bytes per block of a rank that keeps everything: what the planner thinks of."""
        return sum(bundle.bytes_per_block for bundle in (*self.bundles, *self.drafts))


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Byte offsets of one rank's buffer for a given block count."""

    placement: Placement
    num_blocks: int
    size: int  # bytes of the whole buffer
    slots: tuple[ByteRange, ...]
    targets: tuple[ByteRange, ...]  # by target ordinal; a slot's start where not owned
    drafts: tuple[ByteRange, ...]
    components: Mapping[str, ByteRange] = field(repr=False)

    def slot_of(self, ordinal: int) -> int | None:
        """The scratch slot that holds this target bundle, None where this rank owns it."""
        owned = self.placement.owners[ordinal] == self.placement.rank
        return None if owned else ordinal % SCRATCH_SLOTS


def build_layout(placement: Placement, num_blocks: int) -> RankLayout:
    """Lay out a rank's buffer.

    Raises:
        PlanError: ``num_blocks`` is negative, or a component name occurs twice.
    """
    if num_blocks < 0:
        raise PlanError(f"a KV cache of {num_blocks} blocks cannot be laid out")
    cursor = _Cursor(placement.alignment)
    slots = tuple(cursor.take(size * num_blocks) for size in placement.slot_bytes_per_block)
    targets: list[ByteRange] = []
    for ordinal, bundle in enumerate(placement.bundles):
        size = bundle.bytes_per_block * num_blocks
        if placement.owners[ordinal] == placement.rank:
            targets.append(cursor.take(size))
        else:
            targets.append(ByteRange(slots[ordinal % SCRATCH_SLOTS].offset, size))
    drafts = tuple(cursor.take(draft.bytes_per_block * num_blocks) for draft in placement.drafts)
    components: dict[str, ByteRange] = {}
    every_bundle = zip((*placement.bundles, *placement.drafts), (*targets, *drafts), strict=True)
    for bundle, span in every_bundle:
        offset = span.offset
        for component in bundle.components:
            if component.name in components:
                raise PlanError(f"component {component.name!r} is placed twice")
            components[component.name] = ByteRange(offset, component.bytes_per_block * num_blocks)
            offset += component.bytes_per_block * num_blocks
    return RankLayout(
        placement=placement,
        num_blocks=num_blocks,
        size=cursor.end,
        slots=slots,
        targets=tuple(targets),
        drafts=drafts,
        components=MappingProxyType(components),
    )


class _Cursor:
    """Hands out spans one after another, each starting at a multiple of the alignment."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self.end = 0

    def take(self, size: int) -> ByteRange:
        offset = -(-self.end // self._alignment) * self._alignment if size else self.end
        self.end = offset + size
        return ByteRange(offset, size)
