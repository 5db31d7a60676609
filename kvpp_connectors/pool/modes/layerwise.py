"""Layer by layer: one object for each layer of a block, and a mark once all of them are there.

A layer's load is submitted when the model reaches the layer ``prefetch`` layers before it, and has
a fence: under KVPP the owner's broadcast of the layer waits for it, and a load that fails is told
to all ranks with the broadcast. What the model computes from such a layer is thrown away, because
the blocks are reported as invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial

import torch

from kvpp_connectors.connector.threads import log_error, make_executor
from kvpp_connectors.pool.block_objects import BlockStore, Staging
from kvpp_connectors.pool.keys import LayerId, Namespace, Shard
from kvpp_connectors.pool.messages import BlockJob
from kvpp_connectors.pool.packing import CacheBlocks, Inventory
from kvpp_connectors.pool.recorded import recorded
from kvpp_connectors.pool.store.base import NOT_RUN, Backend, Outcome, PoolUnavailable
from kvpp_core.device.base import Fence
from kvpp_core.errors import LoadFailed
from kvpp_core.trace import Lane, SpanRecorder

__all__ = ["LayerStores", "StepLoads"]


class LayerStores:
    """A store for each layer of a shard, over one staging memory. For one thread."""

    def __init__(
        self,
        backend: Backend,
        caches: Mapping[str, torch.Tensor],
        inventory: Inventory,
        staging: Staging,
        spans: SpanRecorder,
    ) -> None:
        """Bind the caches; see BlockStore."""
        self._backend, self._spans = backend, spans
        self._stores = {
            layer: BlockStore(backend, CacheBlocks(caches, inventory.of_layer(layer)), staging)
            for layer in inventory.layers
        }

    @property
    def layers(self) -> tuple[LayerId, ...]:
        """Target layers in order, then drafts."""
        return tuple(self._stores)

    def load(
        self, namespace: Namespace, shard: Shard, layer: LayerId, jobs: Sequence[BlockJob]
    ) -> list[Outcome]:
        """Load one layer of all blocks of ``jobs``, one outcome each."""
        objects = [o for job in jobs for o in job.objects(_key_of(namespace, shard, layer))]
        return self._recorded(Lane.LOAD, layer, lambda: self._stores[layer].load(objects))

    def save(self, namespace: Namespace, shard: Shard, job: BlockJob) -> None:
        """Save all layers of the blocks that have no mark, then the marks of those that are
        whole."""
        marks = {found: namespace.commit_key(found, shard) for found in job.hashes}
        marked = self._there(list(marks.values()))
        job = job.where(lambda _, found: marks[found] not in marked)
        whole = [True] * len(job.blocks)
        for layer, store in self._stores.items():
            objects = job.objects(_key_of(namespace, shard, layer))
            outcomes = self._recorded(Lane.SAVE, layer, partial(store.save, objects))
            whole = [so_far and o.ok for so_far, o in zip(whole, outcomes, strict=True)]
        keys = [marks[found] for found, is_whole in zip(job.hashes, whole, strict=True) if is_whole]
        next(iter(self._stores.values())).mark(keys)

    def _there(self, keys: Sequence[str]) -> set[str]:
        """Those that the store has; none where it cannot be asked: the saves say why then."""
        try:
            return {
                key for key, there in zip(keys, self._backend.exist(keys), strict=True) if there
            }
        except PoolUnavailable:
            return set()

    def _recorded(
        self, lane: Lane, layer: LayerId, move: Callable[[], list[Outcome]]
    ) -> list[Outcome]:
        name, index = ("draft", None) if layer.draft else (None, layer.index)
        return recorded(self._spans, lane, move, self._stores[layer].object_bytes, name, index)


class StepLoads:
    """The loads of one step, layer by layer, on a thread. Offered to the engine as LayerLoads."""

    def __init__(
        self, stores: LayerStores | None, prefetch: int, shard: Shard, device: torch.device
    ) -> None:
        """``stores``: None for a rank that keeps nothing, which still follows the steps."""
        self._stores, self._prefetch, self._shard = stores, prefetch, shard
        self._thread = make_executor("kvpp-pool-layers", device=device)
        self._order: list[int] = []  # all target layers of the stage, as the model runs them
        self._jobs: list[BlockJob] = []
        self._namespace: Namespace | None = None
        self._ready: torch.Event | None = None
        self._fences: dict[int, Future[None]] = {}
        self._waiting: list[int] = []  # layers of this rank that are not submitted yet
        self._invalid_blocks: set[int] = set()

    def expect(self, layers: Iterable[int]) -> None:
        """The target layers of this rank's stage."""
        self._order = sorted(layers)

    def start(
        self, namespace: Namespace, jobs: list[BlockJob], ready: torch.Event | None = None
    ) -> None:
        """Load this step's blocks: drafts now, target layers as the model reaches them.

        Nothing is written before ``ready``.
        """
        self.settle()
        self._namespace, self._jobs, self._ready = namespace, jobs, ready
        layers = self._stores.layers if self._stores is not None and jobs else ()
        for layer in layers:
            if layer.draft:
                wait([self._begin(layer, Future())])
        self._waiting = [layer.index for layer in layers if not layer.draft]
        self._fences = {layer: Future() for layer in self._waiting}
        self._submit(self._order[0] if self._order else 0)

    def take_fences(self) -> Mapping[int, Fence] | None:
        """See LayerLoads."""
        return self._fences if self._jobs else None

    def reached(self, layer: int) -> None:
        """See LayerLoads."""
        if self._waiting:
            self._submit(layer)

    def failed(self, layer: int, late: bool) -> None:
        """See LayerLoads.

        A load that failed has named its own blocks. Of one that was given up, none was there when
        the layer was broadcast, whatever came of it since.
        """
        if late and layer in self._fences:
            self._invalid_blocks |= {block for job in self._jobs for block in job.blocks}

    def settle(self) -> None:
        """Wait until no load writes any more; the step and its fences are over."""
        if self._waiting:
            self._submit(self._order[-1])
        wait(self._fences.values())
        self._fences, self._jobs = {}, []

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of this step that did not come whole; waits for what is still under way."""
        self.settle()
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def close(self) -> None:
        """End the thread."""
        self.settle()
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
        assert self._stores is not None and self._namespace is not None
        blocks = [block for job in self._jobs for block in job.blocks]
        outcomes = [NOT_RUN] * len(blocks)
        try:
            if self._ready is not None:
                self._ready.synchronize()
            outcomes = self._stores.load(self._namespace, self._shard, layer, self._jobs)
        finally:
            bad = [(b, o) for b, o in zip(blocks, outcomes, strict=True) if not o.ok]
            self._invalid_blocks |= {block for block, _ in bad}
            if bad:
                fence.set_exception(LoadFailed(f"{len(bad)} blocks of {layer.tag}: {bad[0][1]}"))
            else:
                fence.set_result(None)


def _key_of(namespace: Namespace, shard: Shard, layer: LayerId) -> Callable[[bytes], str]:
    """The key of a layer of the block with a given hash."""
    return lambda block_hash: namespace.layer_key(block_hash, shard, layer)
