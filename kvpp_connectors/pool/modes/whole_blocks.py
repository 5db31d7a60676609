"""Whole blocks: one object for a rank's share of a block, loaded before the step or between steps.

A rank that keeps nothing follows the loads all the same: vLLM waits for every worker's report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from kvpp_connectors.connector.threads import log_error, make_executor
from kvpp_connectors.log import get_logger
from kvpp_connectors.pool.block_objects import BlockObject, BlockStore, NothingKept
from kvpp_connectors.pool.keys import Namespace
from kvpp_connectors.pool.messages import BlockJob
from kvpp_connectors.pool.modes.base import EndedLoads, LoadMode, RankShare
from kvpp_connectors.pool.packing import CacheBlocks
from kvpp_connectors.pool.store.base import NOT_RUN, StoreOutcome
from kvpp_core.trace import Lane

__all__ = ["WholeBlocks"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _RunningLoad:
    """A load that runs beside the model."""

    job: BlockJob
    outcomes: Future[list[StoreOutcome]]


class WholeBlocks(LoadMode):
    """The mode of `use_layerwise: false`."""

    def __init__(self, share: RankShare, load_async: bool) -> None:
        """Bind the caches.

        Raises:
            KvppError: staging holds no object, or the store refused the memory.
        """
        self._share, self._load_async = share, load_async
        self._writer, self._reader = _open(share), _open(share)
        self._thread = make_executor("kvpp-pool-load", device=share.device)
        self._running: list[_RunningLoad] = []
        self._invalid_blocks: set[int] = set()

    def start(
        self, namespace: Namespace, loads: Sequence[BlockJob], ready: torch.Event | None
    ) -> None:
        """Loads between steps run on; others end here."""
        for job in loads:
            outcomes = log_error(
                self._thread.submit(self._load, namespace, job, ready),
                f"request {job.request_id}: a load from the pool ended with an error",
            )
            load = _RunningLoad(job, outcomes)
            if self._load_async:
                self._running.append(load)
            else:
                self._note(load)

    def save(self, namespace: Namespace, job: BlockJob, copied: Callable[[], object]) -> None:
        """One object a block."""
        writer, objects = self._writer, self._objects(namespace, job)
        self._share.traced(Lane.SAVE, lambda: writer.save(objects, copied), writer.object_bytes)

    def finished(self) -> EndedLoads:
        """Those that have ended, well or not."""
        ended = [load for load in self._running if load.outcomes.done()]
        self._running = [load for load in self._running if load not in ended]
        failed = {load.job.request_id for load in ended if self._note(load)}
        return EndedLoads({load.job.request_id for load in ended}, failed)

    def take_invalid_blocks(self) -> set[int]:
        """Of loads that have ended."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def close(self) -> None:
        """Loads that have not begun are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def _load(
        self, namespace: Namespace, job: BlockJob, ready: torch.Event | None
    ) -> list[StoreOutcome]:
        if ready is not None:
            ready.synchronize()
        reader, objects = self._reader, self._objects(namespace, job)
        return self._share.traced(Lane.LOAD, lambda: reader.load(objects), reader.object_bytes)

    def _objects(self, namespace: Namespace, job: BlockJob) -> list[BlockObject]:
        return job.objects(lambda found: namespace.block_key(found, self._share.shard))

    def _note(self, load: _RunningLoad) -> bool:
        """Wait for its end, and remember blocks that were not loaded; whether there are any."""
        job, error = load.job, load.outcomes.exception()
        outcomes = load.outcomes.result() if error is None else [NOT_RUN] * len(job.blocks)
        bad = [(b, o) for b, o in zip(job.blocks, outcomes, strict=True) if not o.ok]
        self._invalid_blocks |= {block for block, _ in bad}
        if bad:
            logger.warning(
                "request %s: %d of %d blocks did not come from the pool (%s); they are invalid",
                job.request_id, len(bad), len(job.blocks), bad[0][1],
            )  # fmt: skip
        return bool(bad)


def _open(share: RankShare) -> BlockStore | NothingKept:
    if not share.inventory.parts:
        return NothingKept()
    blocks = CacheBlocks(share.rows, share.inventory)
    return BlockStore(share.store, blocks, share.staging())
