"""Which bytes of which caches make an object, and moving them to and from staging memory.

    object  = [ header, 64 bytes | payload ]                  (block_objects.py)
    payload = [ target layers by index ... | draft layers ... ], each layer its components in order

What a rank keeps for good is in it: its own target layers and its drafts. Scratch never is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvpp_connectors.connector.caches import byte_rows, storages
from kvpp_connectors.pool.keys import LayerId
from kvpp_connectors.pool.store.base import Buffer
from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.errors import KvppError
from kvpp_core.layout import Placement

__all__ = ["CacheBlocks", "Inventory", "PayloadPart", "record_event"]


@dataclass(frozen=True, slots=True)
class PayloadPart:
    """One component's bytes in a payload: ``[offset, offset + component.bytes_per_block)``."""

    layer: LayerId
    component: Component
    offset: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a payload holds, in order."""

    parts: tuple[PayloadPart, ...]

    @classmethod
    def of_bundles(
        cls, targets: Iterable[LayerBundle], drafts: Iterable[LayerBundle] = ()
    ) -> Inventory:
        """Target layers by index, then draft layers by index."""
        parts: list[PayloadPart] = []
        offset = 0
        for draft, bundles in ((False, targets), (True, drafts)):
            for bundle in sorted(bundles, key=lambda bundle: bundle.layer):
                for component in bundle.components:
                    parts.append(PayloadPart(LayerId(draft, bundle.layer), component, offset))
                    offset += component.bytes_per_block
        return cls(tuple(parts))

    @classmethod
    def kept(cls, placement: Placement) -> Inventory:
        """What a KVPP rank keeps for good: its own target layers and its drafts."""
        return cls.of_bundles((placement.bundles[i] for i in placement.owned), placement.drafts)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a payload; 0 for a rank that keeps nothing, which has no objects."""
        return sum(part.component.bytes_per_block for part in self.parts)

    @property
    def layers(self) -> tuple[LayerId, ...]:
        """The layers in it, in order."""
        return tuple(dict.fromkeys(part.layer for part in self.parts))

    def of_layer(self, layer: LayerId) -> Inventory:
        """One layer of it.

        Raises:
            KvppError: this rank does not keep that layer.
        """
        parts = [part for part in self.parts if part.layer == layer]
        if not parts:
            raise KvppError(
                f"layer {layer.tag} is not kept by this rank, which keeps "
                f"{', '.join(kept.tag for kept in self.layers) or 'nothing'}"
            )
        start = parts[0].offset
        return Inventory(tuple(PayloadPart(p.layer, p.component, p.offset - start) for p in parts))

    def digest(self) -> bytes:
        """8 bytes that differ wherever names, sizes or order do."""
        text = ";".join(
            f"{p.layer.tag}:{p.component.name}:{p.component.bytes_per_block}" for p in self.parts
        )
        return hashlib.sha256(text.encode()).digest()[:8]


def record_event(device: torch.device) -> torch.Event | None:
    """Behind all that this thread's stream of ``device`` was given until now; None on CPU."""
    if device.type == "cpu":
        return None
    # The event's stream is named: it would be that of the thread's current device.
    return torch.accelerator.current_stream(device).record_event()


class CacheBlocks:
    """The blocks of a rank's caches, as an inventory names them. Holds no bytes of its own.

    Not for two threads on one block; the caller orders it with what computes on the caches.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], inventory: Inventory) -> None:
        """Take ``caches``: name -> tensor (blocks, ...), any dtype, one block dense in memory.

        Raises:
            KvppError: a cache is missing, a block has other bytes than the inventory says, its
                bytes are not in one piece, or block counts differ.
        """
        self.inventory = inventory
        self._rows = tuple((part, _rows_of(caches, part.component)) for part in inventory.parts)
        counts = {rows.shape[0] for _, rows in self._rows}
        if len(counts) > 1:
            raise KvppError(f"caches of one block table have different block counts: {counts}")
        self.num_blocks = counts.pop() if counts else 0
        self.device = self._rows[0][1].device if self._rows else torch.device("cpu")

    def gather(self, blocks: Sequence[int], staged: torch.Tensor) -> None:
        """Copy blocks into ``staged``: uint8 (len(blocks), payload bytes), rows may be strided.

        They are there when this returns.

        Raises:
            KvppError: a block or the shape of ``staged`` is out of range.
        """
        ids = self._checked(blocks, staged)
        for part, rows in self._rows:
            place = staged[:, part.offset : part.offset + part.component.bytes_per_block]
            if rows.device == place.device:
                torch.index_select(rows, 0, ids, out=place)
            else:
                place.copy_(rows.index_select(0, ids))
        self._complete()

    def scatter(self, staged: torch.Tensor, blocks: Sequence[int]) -> None:
        """Copy ``staged``, as of ``gather``, into blocks, each named once. They are there when this
        returns.

        Raises:
            KvppError: a block or the shape of ``staged`` is out of range.
        """
        ids = self._checked(blocks, staged)
        if len(set(blocks)) != len(blocks):
            raise KvppError(f"blocks {list(blocks)[:8]} are loaded twice in one call")
        for part, rows in self._rows:
            place = staged[:, part.offset : part.offset + part.component.bytes_per_block]
            if rows.device.type == place.device.type == "cpu":
                rows.numpy()[ids.numpy()] = place.numpy()  # torch scatters bytes 20 times slower
            else:
                rows.index_copy_(0, ids, place.to(rows.device))
        self._complete()

    def segments(self, block: int) -> Buffer:
        """Where a block lies in memory: one piece for each component, in payload order.

        Raises:
            KvppError: there is no such block.
        """
        self._check_range([block])
        return Buffer(
            tuple(rows.data_ptr() + block * rows.stride(0) for _, rows in self._rows),
            tuple(part.component.bytes_per_block for part, _ in self._rows),
        )

    def storages(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of the memory under the caches, once each, to register it."""
        return storages(rows for _, rows in self._rows)

    def _complete(self) -> None:
        """What is sent or broadcast next is read by others than this thread's stream."""
        if (copied := record_event(self.device)) is not None:
            copied.synchronize()

    def _checked(self, blocks: Sequence[int], staged: torch.Tensor) -> torch.Tensor:
        expected = (len(blocks), self.inventory.payload_bytes)
        if staged.dtype != torch.uint8 or tuple(staged.shape) != expected:
            raise KvppError(
                f"staging of {staged.dtype} {tuple(staged.shape)} for {len(blocks)} blocks; "
                f"expected uint8 {expected}"
            )
        self._check_range(blocks)
        return torch.tensor(blocks, dtype=torch.int64, device=self.device)

    def _check_range(self, blocks: Sequence[int]) -> None:
        wrong = [block for block in blocks if not 0 <= block < self.num_blocks]
        if wrong:
            raise KvppError(f"blocks {wrong[:8]} are not among the {self.num_blocks} of this rank")


def _rows_of(caches: Mapping[str, torch.Tensor], component: Component) -> torch.Tensor:
    cache = caches.get(component.name)
    if cache is None:
        raise KvppError(
            f"cache {component.name!r} is not among this rank's {len(caches)} caches "
            f"({', '.join(list(caches)[:4])}, ...)"
        )
    return byte_rows(component.name, cache, cache.shape[0], component.bytes_per_block)
