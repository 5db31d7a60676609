"""The half of AscendStoreConnector that runs in each worker: moves blocks to and from the store.

Saves run on a thread and read blocks that the step before has filled; a block is given to nobody
else before its save has read it. Loads run on another thread, or before the step that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from kvpp_connectors.connector.caches import single_tensors
from kvpp_connectors.connector.facts import RankPosition
from kvpp_connectors.connector.process import KvppFacts, offer_layer_loads
from kvpp_connectors.connector.threads import log_error, make_executor
from kvpp_connectors.log import get_logger
from kvpp_connectors.pool.block_objects import BlockStore, Staging
from kvpp_connectors.pool.facts import PoolFacts
from kvpp_connectors.pool.keys import Namespace, Shard
from kvpp_connectors.pool.messages import BlockJob, Life, PoolStep, PoolWorkerFacts
from kvpp_connectors.pool.modes.layerwise import LayerStores, StepLoads
from kvpp_connectors.pool.packing import CacheBlocks, Inventory
from kvpp_connectors.pool.recorded import recorded
from kvpp_connectors.pool.stats import PoolStats
from kvpp_connectors.pool.store.base import NOT_RUN, Outcome
from kvpp_connectors.pool.store.resilient import GuardedBackend
from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.trace import Lane

__all__ = ["PoolWorker"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that runs beside the model."""

    job: BlockJob
    outcomes: Future[list[Outcome]]


@dataclass(frozen=True, slots=True)
class _Save:
    """A save that runs beside the model. It reads the blocks until ``copied``."""

    copied: Future[None]
    ended: Future[None]


class PoolWorker:
    """One worker's shard of the pool."""

    def __init__(
        self,
        facts: PoolFacts,
        position: RankPosition,
        kvpp: KvppFacts,
        backend: GuardedBackend,
        stats: PoolStats,
        device: torch.device,
    ) -> None:
        """``device``: where the caches lie."""
        self._facts, self._position, self._kvpp = facts, position, kvpp
        self._device = device
        self._backend, self._stats = backend, stats
        self._caches: CacheBlocks | None = None
        self._save_job: Callable[[Namespace, BlockJob, Callable[[], None]], object] | None = None
        self._reader: BlockStore | None = None
        self._layers: StepLoads | None = None
        self._saving = make_executor("kvpp-pool-save", device=device)
        self._loading = make_executor("kvpp-pool-load", device=device)
        self._saves: dict[Life, list[_Save]] = {}  # until it is over
        self._loads: list[_Load] = []
        self._ended: set[Life] = set()
        self._invalid_blocks: set[int] = set()

    def register(self, layers: Mapping[str, Any]) -> PoolWorkerFacts:
        """Take over the caches.

        Raises:
            KvppError: a block is not in one piece, or staging holds no object.
        """
        kv_caches = single_tensors(layers)
        inventory = self._inventory(kv_caches)
        if inventory.payload_bytes:
            self._caches = CacheBlocks(kv_caches, inventory)
            logger.info(
                "pool rank %s: %d layers, %s bytes a block",
                self._shard.tag,
                len(inventory.layers),
                f"{inventory.payload_bytes:,}",
            )
        if self._facts.options.use_layerwise:
            self._open_layers(kv_caches, inventory)
        elif self._caches is not None:
            writer = BlockStore(self._backend, self._caches, self._staging())
            self._reader = BlockStore(self._backend, self._caches, self._staging())
            self._save_job = lambda namespace, job, copied: recorded(
                self._kvpp.spans,
                Lane.SAVE,
                lambda: writer.save(job.objects(self._key(namespace)), copied),
                writer.object_bytes,
            )
        self._backend.wait_at_start()
        layout = self._kvpp.layout
        drafts = layout.placement.drafts if layout is not None else ()
        return PoolWorkerFacts(
            layers=tuple(kv_caches),
            manifest=self._kvpp.manifest,
            drafts=tuple(
                (c.name, c.bytes_per_block) for bundle in drafts for c in bundle.components
            ),
        )

    def start(self, step: PoolStep) -> None:
        """Start this step's saves and loads; loads that the step needs end here."""
        self._ended |= set(step.ended)
        self._invalid_blocks |= set(step.invalid)
        if step.namespace is None:
            return
        for job in step.saves:
            self._submit_save(step.namespace, job)
        ready = self._given() if step.loads else None
        if self._layers is not None:
            self._layers.start(step.namespace, step.loads, ready)
            if self._kvpp.layout is None:
                self._layers.settle()  # no broadcast waits for them
            return
        for job in step.loads:
            outcomes = log_error(
                self._loading.submit(self._load, step.namespace, job, ready),
                f"request {job.request_id}: a load from the pool ended with an error",
            )
            load = _Load(job, outcomes)
            if self._facts.options.load_async:
                self._loads.append(load)
            else:
                self._note_load(load)

    def release(self, preempted: Collection[Life]) -> None:
        """Return when no save reads a block of these requests any more."""
        running = [save.copied for life in preempted for save in self._saves.get(life, ())]
        _, late = wait(running, self._facts.options.hold_timeout_s)
        if late:
            self._stats.trouble(
                "save/held",
                f"{len(late)} saves still read blocks of preempted requests after "
                f"{self._facts.options.hold_timeout_s:g} s; waiting on",
            )
            wait(late)
        for life in preempted:
            self._saves.pop(life, None)

    def finished(self) -> tuple[set[str], set[str], set[str]]:
        """Requests that are saved, whose load has ended, and whose load has failed.

        A request is held until its objects are in the store, not only until they are copied: an
        engine that is idle has saved everything, and one that holds a request goes on stepping.
        """
        saved = {life for life in self._ended if self._is_saved(life)}
        self._ended -= saved
        for life in saved:
            self._saves.pop(life, None)
        received, failed = set(), set()
        for load in [load for load in self._loads if load.outcomes.done()]:
            self._loads.remove(load)
            received.add(load.job.request_id)
            if self._note_load(load):
                failed.add(load.job.request_id)
        return {life.request_id for life in saved}, received, failed

    def take_invalid_blocks(self) -> set[int]:
        """Local blocks that were to be filled and are not, since the last call."""
        if self._layers is not None:
            self._invalid_blocks |= self._layers.take_invalid_blocks()
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def close(self) -> None:
        """Let what runs end, and give the store back."""
        offer_layer_loads(None)
        if self._layers is not None:
            self._layers.close()
        self._saving.shutdown(cancel_futures=True)
        self._loading.shutdown(cancel_futures=True)
        self._backend.close()

    @property
    def _owns_shard(self) -> bool:
        """Whether no other rank of the stage keeps the same bytes."""
        return self._kvpp.layout is not None or self._facts.heads_split_over > 1

    @property
    def _shard(self) -> Shard:
        return Shard(self._position.pp, self._position.group_rank if self._owns_shard else 0)

    def _inventory(self, kv_caches: Mapping[str, torch.Tensor]) -> Inventory:
        if self._kvpp.layout is not None:
            return Inventory.kept(self._kvpp.layout.placement)
        bundles = [
            LayerBundle(index, (Component(name, cache[0].numel() * cache.element_size()),))
            for index, (name, cache) in enumerate(sorted(kv_caches.items()))
        ]
        return Inventory.of_bundles(bundles)

    def _staging(self) -> Staging:
        assert self._caches is not None
        return Staging(self._backend, self._facts.options.staging_bytes, self._caches.device)

    def _open_layers(self, kv_caches: Mapping[str, torch.Tensor], inventory: Inventory) -> None:
        reader = None
        if self._caches is not None:
            spans = self._kvpp.spans
            reader = LayerStores(self._backend, kv_caches, inventory, self._staging(), spans)
            writer = LayerStores(self._backend, kv_caches, inventory, self._staging(), spans)
            self._save_job = lambda namespace, job, copied: writer.save(namespace, self._shard, job)
        layout, prefetch = self._kvpp.layout, self._facts.options.layerwise_prefetch_layers
        self._layers = StepLoads(reader, prefetch, self._shard, self._device)
        if layout is not None:
            self._layers.expect(bundle.layer for bundle in layout.placement.bundles)
            offer_layer_loads(self._layers)
        else:
            self._layers.expect(layer.index for layer in inventory.layers)

    def _submit_save(self, namespace: Namespace, job: BlockJob) -> None:
        job, save_job = self._share(job), self._save_job
        if save_job is None or not job.blocks:
            return
        ready = self._given()
        copied: Future[None] = Future()

        def save() -> None:
            if ready is not None:
                ready.synchronize()
            try:
                save_job(namespace, job, lambda: copied.set_result(None))
            finally:
                if not copied.done():
                    copied.set_result(None)

        ended = log_error(
            self._saving.submit(save),
            "a save into the pool ended with an error; its blocks are not in it",
        )
        self._saves.setdefault(job.life, []).append(_Save(copied, ended))

    def _given(self) -> torch.Event | None:
        """Behind what the accelerator was given until now: it may use blocks that were freed."""
        return None if self._caches is None else self._caches.given()

    def _load(
        self, namespace: Namespace, job: BlockJob, ready: torch.Event | None
    ) -> list[Outcome]:
        if (reader := self._reader) is None:
            return []
        if ready is not None:
            ready.synchronize()
        objects = job.objects(self._key(namespace))
        return recorded(
            self._kvpp.spans, Lane.LOAD, lambda: reader.load(objects), reader.object_bytes
        )

    def _key(self, namespace: Namespace) -> Callable[[bytes], str]:
        """The key of this rank's share of the block with a given hash."""
        return lambda block_hash: namespace.block_key(block_hash, self._shard)

    def _share(self, job: BlockJob) -> BlockJob:
        """Ranks that keep the same bytes share the work of saving them, by block."""
        if self._owns_shard:
            return job
        rank, ranks = self._position.group_rank, self._position.group_size
        return job.where(lambda block, _: block % ranks == rank)

    def _is_saved(self, life: Life) -> bool:
        return all(save.ended.done() for save in self._saves.get(life, ()))

    def _note_load(self, load: _Load) -> bool:
        """Wait for its end, and remember blocks that were not loaded; whether there are any."""
        job, error = load.job, load.outcomes.exception()
        outcomes = load.outcomes.result() if error is None else [NOT_RUN] * len(job.blocks)
        bad = [
            block for block, outcome in zip(job.blocks, outcomes, strict=False) if not outcome.ok
        ]
        self._invalid_blocks |= set(bad)
        if bad:
            first = next(outcome for outcome in outcomes if not outcome.ok)
            logger.warning(
                "request %s: %d of %d blocks did not come from the pool (%s); they are invalid",
                job.request_id,
                len(bad),
                len(job.blocks),
                first,
            )
        return bool(bad)
