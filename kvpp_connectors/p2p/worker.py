"""The half of MooncakeConnectorV2 that runs in each worker.

At prefill it publishes where this worker's layers lie; at decode it pulls.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvpp_connectors.connector.caches import (
    CachePlan,
    heads_first,
    kept_rows,
    single_tensors,
    storages,
)
from kvpp_connectors.connector.facts import RankPosition
from kvpp_connectors.connector.process import process_engine
from kvpp_connectors.connector.transfer_engine import TransferEngine, default_protocol
from kvpp_connectors.log import get_logger
from kvpp_connectors.p2p.facts import P2pFacts
from kvpp_connectors.p2p.messages import PullResult, StepMetadata, WorkerHandshake
from kvpp_connectors.p2p.metrics import P2pStats
from kvpp_connectors.p2p.peer_sharing import Sharing
from kvpp_connectors.p2p.protocol import (
    Describe,
    Description,
    Noted,
    Refused,
    Reply,
    Request,
    ShareEnded,
    WorkerAddress,
)
from kvpp_connectors.p2p.pull_worker import PullSettings, PullWorker
from kvpp_connectors.p2p.read_plan import cache_regions
from kvpp_connectors.p2p.rpc import ControlServer

__all__ = ["P2pWorker"]

logger = get_logger(__name__)


class P2pWorker:
    """One worker's endpoint, transfer engine and pulls."""

    def __init__(
        self,
        facts: P2pFacts,
        position: RankPosition,
        plan: CachePlan,
        gather: Callable[[WorkerAddress], list[WorkerAddress]],
    ) -> None:
        """``gather`` exchanges addresses among the PCP ranks of this PP and TP rank."""
        self._facts, self._position = facts, position
        self._plan, self._gather = plan, gather
        self._addresses: list[WorkerAddress] = []
        self._engine: TransferEngine | None = None
        self._server: ControlServer | None = None
        self._pull_worker: PullWorker | None = None
        self._description: Description | None = None
        self._invalid_blocks: set[int] = set()
        self._stats = P2pStats()

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Take over the caches: let peers read them, or get ready to pull into them.

        Raises:
            KvppError: the transfer engine does not start, a port is taken, or the caches are not
                as the engine planned them.
        """
        facts, options = self._facts, self._facts.options
        protocol = options.protocol or default_protocol(facts.engine.device_type)
        self._engine = process_engine(facts.host, protocol)
        kept, views = kept_rows(kv_caches, self._plan), single_tensors(kv_caches)
        for address, size in storages(kept.values()):
            self._engine.register(address, size)
        self._description = Description(
            epoch=secrets.token_hex(8),
            session=self._engine.session,
            model=facts.model,
            block_size=facts.engine.block_size,
            kv_cache_dtype=facts.engine.kv_cache_dtype,
            regions=cache_regions(kept, [n for n in kept if heads_first(views[n])]),
        )
        if facts.consumes:
            device = next(iter(views.values())).device
            self._pull_worker = self._make_pull_worker(self._description, self._engine, device)
        if facts.produces or self._shares:
            self._server = self._listen()
            self._addresses = self._gather(
                WorkerAddress(self._server.host, self._server.port, self._description.epoch)
            )

    def handshake(self) -> WorkerHandshake | None:
        """What the scheduler half tells decode, and the other ranks, of this worker."""
        return WorkerHandshake(self._addresses) if self._addresses else None

    def start(self, step: StepMetadata) -> None:
        """Start this step's pulls."""
        if self._pull_worker is None:
            return
        for pull in step.pulls:
            self._pull_worker.submit(pull, step.groups.get(self._position.pp, ()))
        for request_id in step.cancelled:
            self._pull_worker.cancel(request_id)

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose pull has ended: all of them, and those that failed."""
        results = self._pull_worker.take_results() if self._pull_worker is not None else []
        for result in results:
            self._stats.record(result)
            self._log(result)
            if result.problem is not None:
                self._invalid_blocks |= set(result.pull.local_blocks)
        failed = {result.pull.request_id for result in results if result.problem is not None}
        return {result.pull.request_id for result in results}, failed

    def take_invalid_blocks(self) -> set[int]:
        """Local blocks that were to be filled and are not, since the last call."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def take_stats(self) -> P2pStats:
        """What happened since the last call."""
        stats, self._stats = self._stats, P2pStats()
        return stats

    def close(self) -> None:
        """End pulls and stop answering; other ranks may read from here until all have ended."""
        if self._pull_worker is not None:
            self._pull_worker.close()
        if self._server is not None:
            self._server.close()

    def _listen(self) -> ControlServer:
        facts, position = self._facts, self._position
        server = ControlServer(
            facts.host,
            facts.handshake_port(position),
            facts.key,
            self._answer,
            what=f"worker pp {position.pp} pcp {position.pcp} tp {position.tp} of engine "
            f"{facts.engine_id}",
            option=f"kv_transfer_config.kv_port (now {facts.kv_port}; 0 takes free ports)",
        )
        logger.info("worker %s answers handshakes at %s:%d", position, facts.host, server.port)
        if facts.key is None and facts.host not in ("127.0.0.1", "::1", "localhost"):
            logger.warning(
                "%s:%d is open to everybody who can reach it; share a key (key_file, "
                "KVPP_P2P_KEY) and keep Mooncake's own ports on a private network",
                facts.host,
                server.port,
            )
        return server

    def _answer(self, request: Request) -> Reply:
        if isinstance(request, Describe) and self._description is not None:
            return self._description
        if isinstance(request, ShareEnded) and self._pull_worker is not None and self._shares:
            self._pull_worker.on_peer_status(request)
            return Noted()
        return Refused("a worker's endpoint; leases are kept at remote_host:remote_port")

    @property
    def _shares(self) -> bool:
        # With KVPP no two ranks keep the same layers.
        return self._facts.shares_pulls and self._plan.layout is None

    def _make_pull_worker(
        self, own: Description, engine: TransferEngine, device: torch.device
    ) -> PullWorker:
        facts, options = self._facts, self._facts.options
        sharing = None
        if self._shares:
            sharing = Sharing(own, facts.key, options.control_timeout_s, options.share_wait_s)
        return PullWorker(own, engine, self._pull_settings(device), sharing)

    def _pull_settings(self, device: torch.device) -> PullSettings:
        facts, options = self._facts, self._facts.options
        return PullSettings(
            engine_id=facts.engine_id,
            reader=self._position.engine_rank,
            readers=facts.engine.workers,
            key=facts.key,
            control_timeout=options.control_timeout_s,
            pull_timeout=options.pull_timeout_s,
            window=options.window,
            threads=options.threads,
            device=device,
        )

    def _log(self, result: PullResult) -> None:
        pull, params = result.pull, result.pull.params
        if result.problem is None:
            logger.info(
                "request %s: pulled %s bytes of %d blocks in %.3f s from engine %s (transfer %s), "
                "%s bytes from other ranks",
                pull.request_id,
                f"{result.bytes:,}",
                len(pull.local_blocks),
                result.seconds,
                params.remote_engine_id,
                params.kvpp.transfer_id,
                f"{result.shared_bytes:,}",
            )
        else:
            logger.error(
                "request %s: its KV did not come from engine %s (transfer %s, lease at %s:%d): "
                "%s: %s",
                pull.request_id,
                params.remote_engine_id,
                params.kvpp.transfer_id,
                params.remote_host,
                params.remote_port,
                result.reason,
                result.problem,
            )
