"""The half of AscendStoreConnector that runs in each worker: moves blocks to and from the store.

Saves run on a thread and read blocks that the step before has filled; a block is given to nobody
else before its save has read it. How loads run is the mode's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch

from kvpp_connectors.connector.caches import CachePlan, kept_rows, single_tensors
from kvpp_connectors.connector.facts import RankPosition
from kvpp_connectors.connector.process import KvppFacts
from kvpp_connectors.log import get_logger
from kvpp_connectors.pool.facts import PoolFacts
from kvpp_connectors.pool.keys import Shard
from kvpp_connectors.pool.messages import BlockJob, Life, PoolStep, PoolWorkerFacts
from kvpp_connectors.pool.modes import RankShare, create_mode
from kvpp_connectors.pool.packing import Inventory, record_event
from kvpp_connectors.pool.saves import SaveQueue
from kvpp_connectors.pool.stats import PoolStats
from kvpp_connectors.pool.store.base import Store
from kvpp_core.bundles import Component, LayerBundle

__all__ = ["PoolWorker"]

logger = get_logger(__name__)


class PoolWorker:
    """One worker's share of the pool."""

    def __init__(
        self,
        facts: PoolFacts,
        position: RankPosition,
        kvpp: KvppFacts,
        store: Store,
        stats: PoolStats,
        device: torch.device,
        plan: CachePlan,
        kv_caches: Mapping[str, Any],
    ) -> None:
        """Take over the caches, which lie on ``device``.

        Raises:
            KvppError: a cache is not what was planned, or staging holds no object.
        """
        self._position = position
        # Whether no other rank of the stage keeps the same bytes.
        self._owns_shard = kvpp.layout is not None or facts.heads_split_over > 1
        rows = kept_rows(kv_caches, plan)
        share = RankShare(
            store=store,
            rows=rows,
            inventory=_inventory(rows, kvpp),
            shard=Shard(position.pp, position.group_rank if self._owns_shard else 0),
            staging_bytes=facts.options.staging_bytes,
            device=device,
            spans=kvpp.spans,
        )
        logger.info(
            "pool rank %s: %d layers, %s bytes a block",
            share.shard.tag, len(share.inventory.layers), f"{share.inventory.payload_bytes:,}",
        )  # fmt: skip
        self._memory_device = share.memory_device
        self._mode = create_mode(share, facts.options, kvpp.layout)
        self._saves = SaveQueue(device, facts.options.hold_timeout_s, stats)
        self._invalid_blocks: set[int] = set()
        drafts = kvpp.layout.placement.drafts if kvpp.layout is not None else ()
        self.facts = PoolWorkerFacts(
            layers=tuple(single_tensors(kv_caches)),
            manifest=kvpp.manifest,
            drafts=tuple(
                (c.name, c.bytes_per_block) for bundle in drafts for c in bundle.components
            ),
        )

    def start(self, step: PoolStep) -> None:
        """Start this step's saves and loads; loads that the step needs end here, or have fences."""
        self._saves.end(step.ended)
        self._invalid_blocks |= set(step.invalid)
        if step.namespace is None:
            return
        # What was freed before this step may still be used by what the device was given until now.
        ready = record_event(self._memory_device) if step.saves or step.loads else None
        for job in map(self._part_of, step.saves):
            if job.blocks:
                self._saves.submit(job.life, partial(self._mode.save, step.namespace, job), ready)
        self._mode.start(step.namespace, step.loads, ready)

    def release(self, preempted: Collection[Life]) -> None:
        """Return when no save reads a block of these requests any more."""
        self._saves.release(preempted)

    def finished(self) -> tuple[set[str], set[str], set[str]]:
        """Requests that are saved, whose load has ended, and whose load has failed.

        A request is held until its objects are in the store, not only until they are copied: an
        engine that is idle has saved everything, and one that holds a request goes on stepping.
        """
        return self._saves.pop_saved(), *self._mode.finished()

    def take_invalid_blocks(self) -> set[int]:
        """Local blocks that were to be filled and are not, since the last call."""
        invalid = self._invalid_blocks | self._mode.take_invalid_blocks()
        self._invalid_blocks = set()
        return invalid

    def close(self) -> None:
        """Let what runs end."""
        self._mode.close()
        self._saves.close()

    def _part_of(self, job: BlockJob) -> BlockJob:
        """Ranks that keep the same bytes save each its part of the blocks."""
        if self._owns_shard:
            return job
        rank, ranks = self._position.group_rank, self._position.group_size
        return job.where(lambda block, _: block % ranks == rank)


def _inventory(rows: Mapping[str, torch.Tensor], kvpp: KvppFacts) -> Inventory:
    if kvpp.layout is not None:
        return Inventory.kept(kvpp.layout.placement)
    bundles = [
        LayerBundle(index, (Component(name, of_component.shape[1]),))
        for index, (name, of_component) in enumerate(sorted(rows.items()))
    ]
    return Inventory.of_bundles(bundles)
