"""Which bytes of which caches make an object, and moving them to and from staging memory.

    object  = [ header, 64 bytes | payload ]                  (objects.py)
    payload = [ target layers by index ... | draft layers ... ], each layer its components in order

What a rank keeps for good is in it: its own target layers and its drafts. Scratch never is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvpp_connectors.pool.keys import LayerId
from kvpp_connectors.pool.store.base import Buffer
from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.errors import KvppError
from kvpp_core.layout import Placement

__all__ = ["CacheBlocks", "Inventory", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """One component's bytes in a payload: ``[offset, offset + component.bytes_per_block)``."""

    layer: LayerId
    component: Component
    offset: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a payload holds, in order."""

    parts: tuple[Part, ...]

    @classmethod
    def of_bundles(
        cls, targets: Iterable[LayerBundle], drafts: Iterable[LayerBundle] = ()
    ) -> Inventory:
        """Target layers by index, then draft layers by index."""
        parts: list[Part] = []
        offset = 0
        for draft, bundles in ((False, targets), (True, drafts)):
            for bundle in sorted(bundles, key=lambda bundle: bundle.layer):
                for component in bundle.components:
                    parts.append(Part(LayerId(draft, bundle.layer), component, offset))
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
        return Inventory(tuple(Part(p.layer, p.component, p.offset - start) for p in parts))

    def digest(self) -> bytes:
        """8 bytes that differ wherever names, sizes or order do."""
        text = ";".join(
            f"{p.layer.tag}:{p.component.name}:{p.component.bytes_per_block}" for p in self.parts
        )
        return hashlib.sha256(text.encode()).digest()[:8]


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
        self._rows = tuple((part, _byte_rows(caches, part.component)) for part in inventory.parts)
        counts = {rows.shape[0] for _, rows in self._rows}
        if len(counts) > 1:
            raise KvppError(f"caches of one block table have different block counts: {counts}")
        self.num_blocks = counts.pop() if counts else 0
        self.device = self._rows[0][1].device if self._rows else torch.device("cpu")

    def given(self) -> torch.Event | None:
        """Behind everything that the accelerator was given until now; None: there is none."""
        if self.device.type == "cpu":
            return None
        # The event's stream is named: it would be that of the thread's current device.
        return torch.accelerator.current_stream(self.device).record_event()

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
        self._settle()

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
        self._settle()

    def pieces(self, block: int) -> Buffer:
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
        found = (rows.untyped_storage() for _, rows in self._rows)
        return tuple(dict.fromkeys((s.data_ptr(), s.nbytes()) for s in found))

    def _settle(self) -> None:
        """What is sent or broadcast next is read by others than this thread's stream."""
        if (copied := self.given()) is not None:
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


def _byte_rows(caches: Mapping[str, torch.Tensor], component: Component) -> torch.Tensor:
    """A cache as uint8 (blocks, bytes per block), over the same memory."""
    cache = caches.get(component.name)
    if cache is None:
        raise KvppError(
            f"cache {component.name!r} is not among this rank's {len(caches)} caches "
            f"({', '.join(list(caches)[:4])}, ...)"
        )
    size = cache.element_size()
    row_bytes = cache[0].numel() * size if cache.shape[0] else component.bytes_per_block
    if row_bytes != component.bytes_per_block:
        raise KvppError(
            f"a block of {component.name!r} has {row_bytes} bytes; the plan says "
            f"{component.bytes_per_block}"
        )
    if cache.shape[0] and not cache[0].is_contiguous():
        raise KvppError(
            f"a block of {component.name!r} is not in one piece; set VLLM_KV_CACHE_LAYOUT=LBNHC"
        )
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
        cache.untyped_storage(),
        cache.storage_offset() * size,
        (cache.shape[0], row_bytes),
        (cache.stride(0) * size, 1),
    )
