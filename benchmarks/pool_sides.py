"""The parts of `python -m benchmarks pool`: a pool on this machine, and a worker's client of it."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvpp_connectors.pool.block_objects import BlockObject
    from kvpp_connectors.pool.store.base import StoreOutcome
    from kvpp_connectors.pool.store.mooncake import MooncakeStore

__all__ = ["LAYERS", "Client", "pool"]

HOST, LAYERS = "127.0.0.1", 8
_STAGING = 64 << 20  # bytes, as by default
_PREFIX = "kvpp1@bench"


@contextmanager
def pool(size: int, own_memory: bool) -> Iterator[tuple[str, MooncakeStore]]:
    """A master's address and a client; this process or another lends ``size`` bytes of memory.

    Raises:
        ChildFailed: a server ended, or lent no memory in time.
    """
    from kvpp_connectors.demo.pool import serving_pool

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpp-bench-")))
        served = stack.enter_context(serving_pool(folder, 0 if own_memory else size))
        master = str(served.master)
        backend = stack.enter_context(closing(_backend(master, size if own_memory else 0)))
        backend.connect()
        yield master, backend


class Client:
    """A worker's caches with blocks to save and load, and the same bytes packed for raw calls."""

    def __init__(self, backend: MooncakeStore, size: int, blocks: int) -> None:
        """Objects of ``size`` bytes of payload; the caches have twice as many blocks."""
        import torch

        from kvpp_connectors.pool.block_objects import HEADER_BYTES, BlockStore, Staging
        from kvpp_connectors.pool.packing import CacheBlocks, Inventory
        from kvpp_core.bundles import Component, LayerBundle

        self._backend = backend
        self._blocks = random.Random(0).sample(range(2 * blocks), blocks)
        part = size // LAYERS
        bundles = [LayerBundle(i, (Component(f"layer {i}", part),)) for i in range(LAYERS)]
        self._tensors = {
            c.name: torch.ones((2 * blocks, part), dtype=torch.uint8)
            for bundle in bundles
            for c in bundle.components
        }
        self._caches = CacheBlocks(self._tensors, Inventory.of_bundles(bundles))
        self._writer, self._reader = (
            BlockStore(backend, self._caches, Staging(backend, _STAGING)) for _ in range(2)
        )
        self._packed = torch.ones((blocks, HEADER_BYTES + size), dtype=torch.uint8)
        self.object_bytes = size

    @property
    def bytes(self) -> int:
        """Bytes of one save or load, without headers."""
        return len(self._blocks) * self.object_bytes

    def keys(self, name: str) -> list[str]:
        """Keys of a set of objects."""
        return [f"{_PREFIX}@{name}@{number}" for number in range(len(self._blocks))]

    def objects(self, name: str) -> list[BlockObject]:
        """A set of objects; their blocks are scattered."""
        from kvpp_connectors.pool.block_objects import BlockObject

        return [BlockObject(*pair) for pair in zip(self.keys(name), self._blocks, strict=True)]

    def raw_put(self, keys: Sequence[str]) -> None:
        """Mooncake alone: one batch of packed bytes."""
        from mooncake.store import ReplicateConfig

        with self._backend.client() as client:
            codes = client.batch_put_from(keys, *self._places(), ReplicateConfig())
        if any(codes):
            raise RuntimeError(f"batch_put_from returned {sorted(set(codes))}")

    def raw_get(self, keys: Sequence[str]) -> None:
        """Mooncake alone: one batch into packed bytes."""
        with self._backend.client() as client:
            codes = client.batch_get_into(keys, *self._places())
        if set(codes) != {self._packed.shape[1]}:
            raise RuntimeError(f"batch_get_into returned {sorted(set(codes))}")

    def save(self, objects: Sequence[BlockObject]) -> None:
        """Save as a worker does."""
        _expect_ok(self._writer.save(objects))

    def load(self, objects: Sequence[BlockObject]) -> None:
        """Load as a worker does."""
        _expect_ok(self._reader.load(objects))

    def ask(self, keys: Sequence[str]) -> None:
        """The lookups of a save: before and after its put."""
        for _ in range(2):
            self._backend.exist(keys)

    def pack(self) -> None:
        """Copy the blocks out of the caches."""
        self._caches.gather(self._blocks, self._payloads)

    def unpack(self) -> None:
        """Copy the blocks into the caches."""
        self._caches.scatter(self._payloads, self._blocks)

    @property
    def _payloads(self) -> torch.Tensor:
        return self._packed[:, -self.object_bytes :]

    def clear(self) -> None:
        """Zero the caches."""
        for cache in self._tensors.values():
            cache.zero_()

    def check(self) -> None:
        """Check that exactly the bytes of the blocks were loaded since `clear`.

        Raises:
            RuntimeError: others were.
        """
        for name, cache in self._tensors.items():
            if not bool((cache[self._blocks] == 1).all()) or int(cache.count_nonzero()) != (
                len(self._blocks) * cache.shape[1]
            ):
                raise RuntimeError(f"{name} does not hold exactly the bytes that were saved")

    def remove_new(self) -> None:
        """Remove the objects of this turn's puts."""
        self._remove(f"{_PREFIX}@new")

    def close(self) -> None:
        """Remove all objects."""
        self._remove(_PREFIX)

    def _remove(self, prefix: str) -> None:
        """Remove by key prefix, in spite of leases: nobody else reads these objects."""
        with self._backend.client() as client:
            client.remove_by_regex(f"^{prefix}", True)

    def _places(self) -> tuple[list[int], list[int]]:
        start, step = self._packed.data_ptr(), self._packed.stride(0)
        count = len(self._packed)
        return [start + i * step for i in range(count)], [step] * count


def _backend(master: str, segment: int) -> MooncakeStore:
    from kvpp_connectors.pool.store.mooncake import MooncakeStore
    from kvpp_connectors.pool.store.mooncake_settings import read_mooncake_settings

    inline = {"master_server_address": master, "global_segment_size": segment}
    return MooncakeStore(read_mooncake_settings({"mooncake": inline}, {}), HOST, "tcp", segment)


def _expect_ok(outcomes: Sequence[StoreOutcome]) -> None:
    if bad := [outcome for outcome in outcomes if not outcome.ok]:
        raise RuntimeError(f"{len(bad)} of {len(outcomes)} objects failed: {bad[0]}")
