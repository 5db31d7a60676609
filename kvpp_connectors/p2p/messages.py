"""What the two halves of the connector tell each other inside one engine, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvpp_connectors.p2p.fetcher import Pull
from kvpp_connectors.p2p.protocol import WorkerAddress

__all__ = ["StepMetadata", "WorkerHandshake"]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step."""

    pulls: list[Pull] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)  # request ids whose pull nobody waits for
    let_go: list[str] = field(default_factory=list)  # request ids whose lease is over
    groups: dict[int, list[WorkerAddress]] = field(default_factory=dict)
    """The decode workers of each pipeline stage, which share their pulls; where they do."""


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once at start-up: the endpoints that were bound.

    vLLM collects one handshake for each PP and TP rank; it speaks for all its PCP ranks.
    """

    addresses: list[WorkerAddress]
