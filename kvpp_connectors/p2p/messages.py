"""What the two halves of the connector tell each other inside one engine: orders, step by step,
and how each ended.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvpp_connectors.p2p.protocol import TICKET, WorkerAddress
from kvpp_connectors.p2p.transfer_params import TransferParams

__all__ = ["Pull", "PullResult", "StepMetadata", "WorkerHandshake"]


@dataclass(frozen=True, slots=True)
class Pull:
    """One request's KV to pull: ``remote_blocks[i]`` of prefill into ``local_blocks[i]``."""

    request_id: str
    params: TransferParams
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    # Names this pull among the ranks of the engine, and proves that its scheduler made it.
    ticket: bytes = field(default_factory=lambda: secrets.token_bytes(TICKET), repr=False)


@dataclass(frozen=True, slots=True)
class PullResult:
    """How a pull ended. ``problem`` is None if every block holds the request's KV."""

    pull: Pull
    problem: str | None
    reason: str  # one word, for counters
    bytes: int = 0  # from prefill
    seconds: float = 0.0
    shared_bytes: int = 0  # from other ranks of this engine
    shares_not_taken: int = 0  # of other ranks, which came from prefill after all


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step."""

    pulls: list[Pull] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)  # request ids whose pull nobody waits for
    released: list[str] = field(default_factory=list)  # request ids whose lease is over
    groups: dict[int, list[WorkerAddress]] = field(default_factory=dict)
    """The decode workers of each pipeline stage, which share their pulls; where they do."""


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once at start-up: the endpoints that were bound.

    vLLM collects one handshake for each PP and TP rank; it speaks for all its PCP ranks.
    """

    addresses: list[WorkerAddress]
