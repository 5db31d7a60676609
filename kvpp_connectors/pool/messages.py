"""What the two halves of AscendStoreConnector tell each other through vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvpp_connectors.pool.block_objects import BlockObject
from kvpp_connectors.pool.keys import Namespace
from kvpp_core.manifest import Manifest

__all__ = ["BlockJob", "PoolStep", "PoolWorkerFacts"]


@dataclass(frozen=True, slots=True)
class PoolWorkerFacts(KVConnectorHandshakeMetadata):
    """What a worker keeps, for the scheduler half, which names the objects."""

    layers: tuple[str, ...]  # names of its caches
    manifest: Manifest | None  # of its group; None without KVPP
    drafts: tuple[tuple[str, int], ...] = ()  # its draft caches: name, bytes per block; with KVPP


@dataclass(frozen=True, slots=True)
class BlockJob:
    """Blocks of one request to load or to save, with their hashes, in order."""

    request_id: str
    blocks: tuple[int, ...]
    hashes: tuple[bytes, ...]

    def objects(self, key: Callable[[bytes], str]) -> list[BlockObject]:
        """The blocks as objects; ``key`` gives the key of a block's hash."""
        return [
            BlockObject(key(block_hash), block)
            for block, block_hash in zip(self.blocks, self.hashes, strict=True)
        ]


@dataclass
class PoolStep(KVConnectorMetadata):
    """What the workers are to do in this step."""

    namespace: Namespace | None = None  # None: nothing is loaded or saved yet
    loads: list[BlockJob] = field(default_factory=list)
    saves: list[BlockJob] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)  # requests whose blocks are taken away
    ended: list[str] = field(default_factory=list)  # requests whose blocks wait for their saves
    spoilt: list[int] = field(default_factory=list)  # blocks to report as invalid once more
