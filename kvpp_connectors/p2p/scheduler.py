"""The half of MooncakeConnectorV2 that runs beside vLLM's scheduler.

At prefill it keeps the leases; at decode it decides what is pulled, once per request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from kvpp_connectors.log import get_logger
from kvpp_connectors.p2p.facts import P2pFacts
from kvpp_connectors.p2p.heartbeat import Heartbeat
from kvpp_connectors.p2p.lease import LeaseBook, answer
from kvpp_connectors.p2p.messages import Pull, WorkerHandshake
from kvpp_connectors.p2p.protocol import (
    Reply,
    Request,
    WorkerAddress,
)
from kvpp_connectors.p2p.rpc import ControlServer
from kvpp_connectors.p2p.transfer_params import (
    PARAMS_VERSION,
    BadTransferParams,
    TransferLease,
    TransferParams,
    make_params,
    read_params,
)

__all__ = ["DecodeScheduler", "PrefillScheduler"]

logger = get_logger(__name__)


class PrefillScheduler:
    """Leases of this engine's finished requests, kept at an endpoint of their own."""

    def __init__(self, facts: P2pFacts) -> None:
        self._facts = facts
        self._lock = threading.Lock()
        self._book = LeaseBook(facts.options.lease_seconds)
        self._workers: list[WorkerAddress] = []
        self._server = ControlServer(
            facts.host,
            0,
            facts.key,
            self._answer,
            what=f"the lease endpoint of engine {facts.engine_id}",
            option="kv_connector_extra_config.host",
            tick=self._expire,
        )

    def set_handshakes(self, handshakes: Mapping[tuple[int, ...], WorkerHandshake]) -> None:
        """Learn the endpoints that the workers bound, by rank."""
        self._workers = [
            address for rank in sorted(handshakes) for address in handshakes[rank].addresses
        ]

    def finished(self, request: Any, block_ids: list[int]) -> dict[str, Any] | None:
        """A request that decode asked for has ended: offer its prompt's blocks, or None.

        The blocks must stay until `pop_released` names the request.
        """
        raw = _raw_params(request)
        tokens = request.num_prompt_tokens
        if not raw.get("do_remote_decode") or request.num_computed_tokens < tokens:
            return None
        # Blocks beyond the prompt hold nothing of it: tokens drafted or looked ahead.
        blocks = block_ids[: -(-tokens // self._facts.engine.block_size)]
        with self._lock:
            generation = self._book.grant(request.request_id, request.request_id, time.monotonic())
        params = TransferParams(
            remote_engine_id=self._facts.engine_id,
            remote_host=self._server.host,
            remote_port=self._server.port,
            remote_block_ids=[blocks],
            remote_num_tokens=tokens,
            remote_block_size=self._facts.engine.block_size,
            kvpp=TransferLease(PARAMS_VERSION, request.request_id, generation, self._workers),
        )
        engine = self._facts.engine
        return make_params(params, request.request_id, engine.tp, engine.pp, engine.pcp)

    def pop_released(self) -> list[str]:
        """Requests whose blocks nobody may read any more, each once."""
        with self._lock:
            ended = self._book.take_ended()
        for lease in ended:
            logger.info("request %s: lease over (%s)", lease.request_id, lease.reason)
        return [lease.request_id for lease in ended]

    def counts(self) -> dict[str, int]:
        """Leases granted, read, released and expired since the start, and messages refused."""
        with self._lock:
            leases = {f"leases_{name}": count for name, count in self._book.counts.items()}
        return {**leases, "messages_refused": self._server.refused.total()}

    def close(self) -> None:
        """Stop answering."""
        self._server.close()

    def _expire(self) -> None:
        with self._lock:
            self._book.expire(time.monotonic())

    def _answer(self, request: Request) -> Reply:
        with self._lock:
            return answer(self._book, request, self._facts.options.lease_seconds, time.monotonic())


class DecodeScheduler:
    """Which requests are pulled. A request is pulled once; what comes later is computed here."""

    def __init__(self, facts: P2pFacts) -> None:
        self._facts = facts
        self._heartbeat = Heartbeat(facts.engine_id, facts.key, facts.options.control_timeout_s)
        self._waiting: dict[str, TransferParams] = {}  # requests that have not been pulled yet
        self._pulling: dict[str, bool] = {}  # whether the pull was cancelled
        self._pulls: list[Pull] = []
        self._cancelled: list[str] = []
        self.groups: dict[int, list[WorkerAddress]] = {}

    def set_handshakes(self, handshakes: Mapping[tuple[int, ...], WorkerHandshake]) -> None:
        """Learn which workers share their pulls: those of one pipeline stage that say where."""
        if not self._facts.shares_pulls:
            return
        self.groups = {}
        for ranks in sorted(handshakes):
            self.groups.setdefault(ranks[0], []).extend(handshakes[ranks].addresses)
        for stage, workers in self.groups.items():
            logger.info("stage %d: %d workers share their pulls", stage, len(workers))

    def arrived(self, request: Any) -> None:
        """Read a new request's params, and keep its lease alive while the request waits."""
        raw = _raw_params(request)
        if not raw.get("do_remote_prefill"):
            return
        try:
            params = read_params(raw)
        except BadTransferParams as error:
            logger.error("request %s: computed here, %s", request.request_id, error)
            return
        self._heartbeat.add(request.request_id, params)
        self._waiting[request.request_id] = params

    def external_tokens(self, request: Any, computed: int) -> int:
        """Prompt tokens beyond ``computed`` that can be pulled.

        They are compared with its request here and not on arrival: for a request that its server
        turns away vLLM sends one of a single token, which ends at once.
        """
        params = self._waiting.get(request.request_id)
        if params is None:
            return 0
        if problem := self._mismatch(request, params):
            logger.error("request %s: computed here, %s", request.request_id, problem)
            del self._waiting[request.request_id]
            self._heartbeat.release(request.request_id, "mismatch")
            return 0
        return max(0, params.remote_num_tokens - computed)

    def allocated(self, request: Any, block_ids: list[int], tokens: int) -> None:
        """Blocks are there: pull ``tokens`` tokens, or nothing if all are here already."""
        params = self._waiting.pop(request.request_id, None)
        if params is None:
            return
        if not tokens:
            self._heartbeat.release(request.request_id, "not needed")
            return
        first = (params.remote_num_tokens - tokens) // self._facts.engine.block_size
        self._pulls.append(
            Pull(
                request.request_id,
                params,
                tuple(params.blocks[first:]),
                tuple(block_ids[first : len(params.blocks)]),
            )
        )
        self._pulling[request.request_id] = False

    def ended(self, request: Any) -> None:
        """A request is over: what was not pulled is released, a running pull is cut short."""
        if self._waiting.pop(request.request_id, None) is not None:
            self._heartbeat.release(request.request_id, "request ended")
        if self._pulling.get(request.request_id) is False:
            self._pulling[request.request_id] = True
            self._cancelled.append(request.request_id)

    def received(self, request_ids: set[str]) -> None:
        """Pulls that ended on all workers."""
        for request_id in request_ids & self._pulling.keys():
            del self._pulling[request_id]
            self._heartbeat.remove(request_id)

    def take_step(self) -> tuple[list[Pull], list[str]]:
        """Pulls to start and request ids to cancel in this step."""
        pulls, self._pulls = self._pulls, []
        cancelled, self._cancelled = self._cancelled, []
        return pulls, cancelled

    def counts(self) -> dict[str, int]:
        """Messages that did not reach their lease."""
        return {"leases_not_reached": self._heartbeat.not_reached}

    def close(self) -> None:
        """Stop renewing."""
        self._heartbeat.close()

    def _mismatch(self, request: Any, params: TransferParams) -> str | None:
        if params.remote_block_size != self._facts.engine.block_size:
            return (
                f"the prefill side has blocks of {params.remote_block_size} tokens, this side of "
                f"{self._facts.engine.block_size}"
            )
        if params.remote_num_tokens != request.num_prompt_tokens:
            return (
                f"{params.remote_num_tokens} tokens were prefilled and the prompt has "
                f"{request.num_prompt_tokens}; do both sides use the same chat template?"
            )
        return None


def _raw_params(request: Any) -> Mapping[str, Any]:
    """The request's kv_transfer_params. vLLM passes on whatever JSON value a client sent."""
    params = request.kv_transfer_params
    if params is None or isinstance(params, Mapping):
        return params or {}
    logger.error(
        "request %s: computed here, its kv_transfer_params are no object but a %s",
        request.request_id,
        type(params).__name__,
    )
    return {}
