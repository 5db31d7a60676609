"""What the two halves of AscendStoreConnector tell each other through vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvpp_connectors.pool.block_objects import BlockObject
from kvpp_connectors.pool.keys import Namespace
from kvpp_core.manifest import Manifest

__all__ = ["BlockJob", "Life", "PoolStep", "PoolWorkerFacts"]


@dataclass(frozen=True, slots=True)
class PoolWorkerFacts(KVConnectorHandshakeMetadata):
    """What a worker keeps, for the scheduler half, which names the objects."""

    layers: tuple[str, ...]  # names of its caches
    manifest: Manifest | None  # of its group; None without KVPP
    drafts: tuple[tuple[str, int], ...] = ()  # its draft caches: name, bytes per block; with KVPP


class Life(NamedTuple):
    """One life of a request: from its arrival, or from a preemption, to its end or preemption.

    An id may be used again, and a request starts over after a preemption. What is still under way
    for an earlier life never counts for a later one.
    """

    request_id: str
    number: int  # no two lives of an engine have the same


@dataclass(frozen=True, slots=True)
class BlockJob:
    """Blocks of one request to load or to save, with their hashes, in order."""

    life: Life
    blocks: tuple[int, ...]
    hashes: tuple[bytes, ...]

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.life.request_id

    def objects(self, key: Callable[[bytes], str]) -> list[BlockObject]:
        """The blocks as objects; ``key`` gives the key of a block's hash."""
        return [
            BlockObject(key(block_hash), block)
            for block, block_hash in zip(self.blocks, self.hashes, strict=True)
        ]

    def where(self, wanted: Callable[[int, bytes], bool]) -> BlockJob:
        """The same job for the blocks, by id and hash, that are wanted."""
        pairs = [
            pair for pair in zip(self.blocks, self.hashes, strict=True) if wanted(pair[0], pair[1])
        ]
        return BlockJob(self.life, tuple(b for b, _ in pairs), tuple(h for _, h in pairs))


@dataclass
class PoolStep(KVConnectorMetadata):
    """What the workers are to do in this step."""

    namespace: Namespace | None = None  # None: nothing is loaded or saved yet
    loads: list[BlockJob] = field(default_factory=list)
    saves: list[BlockJob] = field(default_factory=list)
    preempted: list[Life] = field(default_factory=list)  # whose blocks are taken away
    ended: list[Life] = field(default_factory=list)  # whose blocks wait for their saves
    invalid: list[int] = field(default_factory=list)  # blocks to report as invalid once more
