"""Layer by layer: one object for each layer of a block, and a mark once all of them are there.

A layer's load is submitted when the model reaches the layer ``prefetch`` layers before it, and has
a fence: under KVPP the owner's broadcast of the layer waits for it, and a load that fails is known
to all ranks with the broadcast. What the model computes from such a layer is thrown away, because
the blocks are reported as invalid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial

import torch

from kvpp_connectors.connector.process import offer_layer_loads
from kvpp_connectors.connector.threads import log_error, make_executor
from kvpp_connectors.pool.block_objects import BlockStore, CommitMarks
from kvpp_connectors.pool.keys import LayerId, Namespace, Shard
from kvpp_connectors.pool.messages import BlockJob
from kvpp_connectors.pool.modes.base import EndedLoads, LoadMode, RankShare
from kvpp_connectors.pool.packing import CacheBlocks
from kvpp_connectors.pool.store.base import NOT_RUN, StoreOutcome
from kvpp_core.device.base import Fence
from kvpp_core.errors import LoadFailed
from kvpp_core.layout import RankLayout
from kvpp_core.trace import Lane

__all__ = ["LayerStores", "Layerwise"]


_MOST_MISSED = 1 << 16  # hashes of 32 bytes


class LayerStores:
    """A store for each layer of a rank's share, and its marks, over one staging memory. For one
    thread."""

    def __init__(self, share: RankShare) -> None:
        """Bind the caches; see BlockStore."""
        self._share = share
        staging = share.staging()
        self._stores = {
            layer: BlockStore(
                share.store, CacheBlocks(share.rows, share.inventory.of_layer(layer)), staging
            )
            for layer in share.inventory.layers
        }
        self._marks = CommitMarks(share.store, staging)

    @property
    def layers(self) -> tuple[LayerId, ...]:
        """Target layers in order, then drafts."""
        return tuple(self._stores)

    def load(
        self, namespace: Namespace, layer: LayerId, jobs: Sequence[BlockJob]
    ) -> list[StoreOutcome]:
        """Load one layer of all blocks of ``jobs``, one outcome each."""
        key = _key_of(namespace, self._share.shard, layer)
        objects = [o for job in jobs for o in job.objects(key)]
        return self._traced(Lane.LOAD, layer, lambda: self._stores[layer].load(objects))

    def save(
        self, namespace: Namespace, job: BlockJob, missed: Collection[bytes] = frozenset()
    ) -> None:
        """Save the blocks that are not whole in the store, layer after layer, then their marks.

        A mark alone proves nothing: lookups keep it alive, and not the layers. So its first and
        last layer are asked for, too, and a block that a load has ``missed`` is saved anyway.
        """
        if not self._stores:
            return
        shard = self._share.shard
        marks = {found: namespace.commit_key(found, shard) for found in job.hashes}
        ends = {self.layers[0], self.layers[-1]}
        proofs = {
            found: [mark, *(namespace.layer_key(found, shard, layer) for layer in ends)]
            for found, mark in marks.items()
            if found not in missed
        }
        there = self._marks.there([key for keys in proofs.values() for key in keys])
        whole_there = {found for found, keys in proofs.items() if there.issuperset(keys)}
        job = job.where(lambda _, found: found not in whole_there)
        whole = [True] * len(job.blocks)
        for layer, store in self._stores.items():
            objects = job.objects(_key_of(namespace, shard, layer))
            outcomes = self._traced(Lane.SAVE, layer, partial(store.save, objects))
            whole = [so_far and o.ok for so_far, o in zip(whole, outcomes, strict=True)]
        self._marks.save(
            [
                marks[found]
                for found, is_whole in zip(job.hashes, whole, strict=True)
                if is_whole  # all its layers are in the store
            ]
        )

    def _traced(
        self, lane: Lane, layer: LayerId, move: Callable[[], list[StoreOutcome]]
    ) -> list[StoreOutcome]:
        name, index = ("draft", None) if layer.draft else (None, layer.index)
        return self._share.traced(lane, move, self._stores[layer].object_bytes, name, index)


class _MissedBlocks:
    """Hashes of blocks that loads did not bring, until they are saved again. For all threads.

    Bounded: what is forgotten is taken for whole while its mark and its outer layers are there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hashes: dict[bytes, None] = {}  # the oldest first

    def add(self, hashes: Iterable[bytes]) -> None:
        """A load did not bring them."""
        with self._lock:
            self._hashes.update(dict.fromkeys(hashes))
            while len(self._hashes) > _MOST_MISSED:
                del self._hashes[next(iter(self._hashes))]

    def pop(self, hashes: Iterable[bytes]) -> set[bytes]:
        """Those that were missed; they are about to be saved."""
        with self._lock:
            found = {each for each in hashes if each in self._hashes}
            for each in found:
                del self._hashes[each]
            return found


class Layerwise(LoadMode):
    """The mode of `use_layerwise: true`: the loads of one step, on a thread.

    With KVPP its loads are offered to the engine as LayerLoads; without, no broadcast waits for
    them, and they end before the step's forward.
    """

    def __init__(self, share: RankShare, prefetch: int, layout: RankLayout | None) -> None:
        """Bind the caches; ``prefetch`` is in layers.

        Raises:
            KvppError: staging holds no object, or the store refused the memory.
        """
        self._prefetch = prefetch
        self._reader, self._writer = LayerStores(share), LayerStores(share)
        self._thread = make_executor("kvpp-pool-layers", device=share.device)
        # All target layers of the stage, as the model runs them.
        self._order = sorted(
            (layer.index for layer in share.inventory.layers if not layer.draft)
            if layout is None
            else (bundle.layer for bundle in layout.placement.bundles)
        )
        self._broadcasts = layout is not None
        self._jobs: Sequence[BlockJob] = ()
        self._namespace: Namespace | None = None
        self._ready: torch.Event | None = None
        self._fences: dict[int, Future[None]] = {}
        self._waiting: list[int] = []  # layers of this rank that are not submitted yet
        self._invalid_blocks: set[int] = set()
        self._missed = _MissedBlocks()
        if self._broadcasts:
            offer_layer_loads(self)

    def start(
        self, namespace: Namespace, loads: Sequence[BlockJob], ready: torch.Event | None = None
    ) -> None:
        """Drafts are loaded now, target layers as the model reaches them."""
        self.drain()
        self._namespace, self._jobs, self._ready = namespace, loads, ready
        layers = self._reader.layers if loads else ()
        for layer in layers:
            if layer.draft:
                wait([self._begin(layer, Future())])
        self._waiting = [layer.index for layer in layers if not layer.draft]
        self._fences = {layer: Future() for layer in self._waiting}
        if self._waiting:
            self._submit(self._order[0])
        if not self._broadcasts:
            self.drain()  # no broadcast waits for them

    def save(self, namespace: Namespace, job: BlockJob, copied: Callable[[], object]) -> None:
        """Layer after layer: the blocks are read until the end."""
        self._writer.save(namespace, job, self._missed.pop(job.hashes))

    def finished(self) -> EndedLoads:
        """None runs between steps."""
        return EndedLoads(set(), set())

    def take_fences(self) -> Mapping[int, Fence] | None:
        """This step's loads of this rank, by layer; None where no rank of the group loads."""
        return self._fences if self._jobs else None

    def reached(self, layer: int) -> None:
        """The model is about to touch a layer's cache for the first time in this step."""
        if self._waiting:
            self._submit(layer)

    def failed(self, layer: int, late: bool) -> None:
        """A layer was not loaded by its owner, or not in time.

        A load that failed has named its own blocks. Of one that was given up, none was there when
        the layer was broadcast, whatever came of it since.
        """
        if late and layer in self._fences:
            self._invalid_blocks |= {block for job in self._jobs for block in job.blocks}

    def drain(self) -> None:
        """Wait until no load writes any more; the step and its fences are over."""
        if self._waiting:
            self._submit(self._order[-1])
        wait(self._fences.values())
        self._fences, self._jobs = {}, ()

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of this step that did not come whole; waits for what is still under way."""
        self.drain()
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def close(self) -> None:
        """End the thread."""
        if self._broadcasts:
            offer_layer_loads(None)
        self.drain()
        self._thread.shutdown()

    def _submit(self, reached: int) -> None:
        """Submit the layers whose time has come: layer L at max(0, L - prefetch), by position."""
        position = self._order.index(reached)
        until = self._order[min(position + self._prefetch, len(self._order) - 1)]
        while self._waiting and self._waiting[0] <= until:
            layer = self._waiting.pop(0)
            self._begin(LayerId(False, layer), self._fences[layer])

    def _begin(self, layer: LayerId, fence: Future[None]) -> Future[None]:
        return log_error(
            self._thread.submit(self._load, layer, fence),
            f"the load of {layer.tag} from the pool ended with an error; its blocks are invalid",
        )

    def _load(self, layer: LayerId, fence: Future[None]) -> None:
        """On the thread, once nothing computes any more in what was freed before this step: load a
        layer, name the blocks that did not come, complete its fence."""
        assert self._namespace is not None
        blocks = [block for job in self._jobs for block in job.blocks]
        hashes = [found for job in self._jobs for found in job.hashes]
        outcomes = [NOT_RUN] * len(blocks)
        try:
            if self._ready is not None:
                self._ready.synchronize()
            outcomes = self._reader.load(self._namespace, layer, self._jobs)
        finally:
            bad = [(b, o) for b, o in zip(blocks, outcomes, strict=True) if not o.ok]
            self._invalid_blocks |= {block for block, _ in bad}
            self._missed.add(h for h, o in zip(hashes, outcomes, strict=True) if not o.ok)
            if bad:
                fence.set_exception(LoadFailed(f"{len(bad)} blocks of {layer.tag}: {bad[0][1]}"))
            else:
                fence.set_result(None)


def _key_of(namespace: Namespace, shard: Shard, layer: LayerId) -> Callable[[bytes], str]:
    """The key of a layer of the block with a given hash."""
    return lambda block_hash: namespace.layer_key(block_hash, shard, layer)
