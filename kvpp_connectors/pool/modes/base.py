"""How a rank moves blocks between its caches and the store: the contract of the load modes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvpp_connectors.pool.block_objects import Staging
from kvpp_connectors.pool.keys import Namespace, Shard
from kvpp_connectors.pool.messages import BlockJob
from kvpp_connectors.pool.packing import Inventory
from kvpp_connectors.pool.store.base import Store, StoreOutcome
from kvpp_core.trace import Lane, SpanRecorder

__all__ = ["EndedLoads", "LoadMode", "RankShare"]


class EndedLoads(NamedTuple):
    """Requests whose load between steps has ended, and those of them for which it has failed."""

    received: set[str]
    failed: set[str]


@dataclass(frozen=True, slots=True)
class RankShare:
    """A rank's share of every block: its bytes, its name in keys, and where it is moved to."""

    store: Store
    rows: Mapping[str, torch.Tensor]  # of each component: uint8 (blocks, bytes per block)
    inventory: Inventory  # empty for a rank that keeps nothing
    shard: Shard
    staging_bytes: int
    device: torch.device  # of the threads that move it
    spans: SpanRecorder

    @property
    def memory_device(self) -> torch.device:
        """Where the caches lie."""
        return next((rows.device for rows in self.rows.values()), torch.device("cpu"))

    def staging(self) -> Staging:
        """Memory for one thread. None is needed where nothing is kept."""
        size = self.staging_bytes if self.inventory.parts else 0
        return Staging(self.store, size, self.memory_device)

    def traced(
        self,
        lane: Lane,
        move: Callable[[], list[StoreOutcome]],
        object_bytes: int,
        name: str | None = None,
        layer: int | None = None,
    ) -> list[StoreOutcome]:
        """The outcomes of ``move``, which loads or saves objects of this size, and a span of it in
        the trace."""
        began = time.monotonic_ns()
        outcomes = move()
        if self.spans.on:
            blocks, failed = len(outcomes), sum(not outcome.ok for outcome in outcomes)
            self.spans.add(
                lane, name or lane.value, began, time.monotonic_ns(), layer,
                bytes=blocks * object_bytes, blocks=blocks, failed=failed,
            )  # fmt: skip
        return outcomes


class LoadMode(ABC):
    """Loads and saves a rank's share of blocks. ``save`` is for one thread, all else for another.

    A mode whose loads end inside the step that needs them says so to the engine: see LayerLoads.
    """

    @abstractmethod
    def start(
        self, namespace: Namespace, loads: Sequence[BlockJob], ready: torch.Event | None
    ) -> None:
        """Start a step's loads; nothing is written before ``ready``.

        When it returns, what the step needs is loaded, or each of its layers has a fence.
        """

    @abstractmethod
    def save(self, namespace: Namespace, job: BlockJob, copied: Callable[[], object]) -> None:
        """Save what the store lacks of a job's blocks.

        The blocks must not change until ``copied`` is called, at the latest when this returns.
        """

    @abstractmethod
    def finished(self) -> EndedLoads:
        """Loads between steps that have ended since the last call."""

    @abstractmethod
    def take_invalid_blocks(self) -> set[int]:
        """Blocks that were to be loaded and were not, since the last call."""

    @abstractmethod
    def close(self) -> None:
        """Let what runs end."""
