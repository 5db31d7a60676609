"""Both sides of a transfer without vLLM's engines: real workers, schedulers, ports and bytes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from kvpp_connectors.connector.caches import CachePlan
from kvpp_connectors.connector.facts import EngineFacts, RankPosition
from kvpp_connectors.connector.transfer_engine import TransferEngine
from kvpp_connectors.p2p import worker as worker_module
from kvpp_connectors.p2p.facts import P2pFacts
from kvpp_connectors.p2p.messages import StepMetadata, WorkerHandshake
from kvpp_connectors.p2p.options import P2pOptions
from kvpp_connectors.p2p.scheduler import DecodeScheduler, PrefillScheduler
from kvpp_connectors.p2p.worker import P2pWorker
from kvpp_core.layout import RankLayout

__all__ = [
    "BLOCK_SIZE",
    "MODEL",
    "PATIENCE",
    "Decode",
    "Prefill",
    "engine_facts",
    "eventually",
    "listening",
    "planned",
    "request",
]

BLOCK_SIZE = 16  # tokens
MODEL = "name=model; revision=main; numbers=n0; weights=w0; dtype=bfloat16; draft=none"
PATIENCE = 30.0  # seconds, the bound of every wait that is expected to end

_NAMES = itertools.count()


def engine_facts(role: str, **changes: Any) -> P2pFacts:
    """Facts of an engine on this host; ``options`` is a mapping."""
    options = {"control_timeout_s": 5.0, **changes.pop("options", {})}
    engine = EngineFacts(
        device_type="cpu",
        block_size=BLOCK_SIZE,
        kv_cache_dtype="bfloat16",
        tp=1,
        pp=1,
        pcp=1,
        dp_rank=0,
    )
    facts = P2pFacts(
        engine=engine,
        engine_id=f"{role}-{next(_NAMES)}",
        produces=role == "prefill",
        consumes=role == "decode",
        host="127.0.0.1",
        kv_port=0,
        options=P2pOptions(**options),
        key=None,
        model=MODEL,
    )
    return changed(facts, **changes)


def changed(facts: P2pFacts, **changes: Any) -> P2pFacts:
    """The facts with other values, the engine's among them."""
    engine = {f.name: changes.pop(f.name) for f in fields(EngineFacts) if f.name in changes}
    return replace(facts, engine=replace(facts.engine, **engine), **changes)


def request(tokens: int, params: Any = None, name: str | None = None, **changes: Any) -> Any:
    """What the scheduler halves read of a vLLM request."""
    values = {
        "request_id": name or f"request-{next(_NAMES)}",
        "kv_transfer_params": params,
        "num_prompt_tokens": tokens,
        "num_computed_tokens": tokens,
    }
    return SimpleNamespace(**(values | changes))


def eventually(probe: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """The first true value of ``probe``."""
    pause, deadline = threading.Event(), time.monotonic() + seconds
    while not (value := probe()):
        assert time.monotonic() < deadline, f"still {value!r} after {seconds} s"
        pause.wait(0.002)
    return value


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """What this package logs meanwhile, from warnings on."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Handler(logging.WARNING), logging.getLogger("vllm.kvpp")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class Prefill:
    """A prefill engine: the lease endpoint, and workers that have caches."""

    def __init__(self, facts: P2pFacts) -> None:
        self.facts = facts
        self.scheduler = PrefillScheduler(facts)
        self._workers: list[P2pWorker] = []
        self._handshakes: dict[tuple[int, ...], WorkerHandshake] = {}

    def add_worker(
        self,
        position: RankPosition,
        caches: Mapping[str, torch.Tensor],
        engine: TransferEngine,
        layout: RankLayout | None = None,
        **changes: Any,
    ) -> None:
        """Start a worker; ``changes`` make its facts differ from the engine's."""
        worker = P2pWorker(
            changed(self.facts, **changes), position, planned(caches, layout), lambda own: [own]
        )
        _register(worker, caches, engine)
        handshake = worker.handshake()
        assert handshake is not None
        self._workers.append(worker)
        self._handshakes[(position.pp, position.pcp, position.tp)] = handshake
        self.scheduler.set_handshakes(self._handshakes)

    def offer(self, tokens: int, blocks: Sequence[int], name: str | None = None) -> dict[str, Any]:
        """kv_transfer_params of a request that was prefilled into ``blocks``, through JSON."""
        finished = request(tokens, {"do_remote_decode": True}, name)
        params = self.scheduler.finished(finished, list(blocks))
        assert params is not None
        words: dict[str, Any] = json.loads(json.dumps(params))
        return words

    def let_go(self) -> list[str]:
        """Wait for leases to end."""
        names: list[str] = eventually(self.scheduler.pop_released)
        return names

    def close(self) -> None:
        """Stop everything."""
        for worker in self._workers:
            worker.close()
        self.scheduler.close()


class Decode:
    """A decode engine: scheduler half and worker halves."""

    def __init__(self, facts: P2pFacts) -> None:
        self.facts = facts
        self.scheduler = DecodeScheduler(facts)
        self._workers: list[P2pWorker] = []

    def add_worker(
        self, position: RankPosition, caches: Mapping[str, torch.Tensor], engine: TransferEngine
    ) -> None:
        """Start a worker."""
        worker = P2pWorker(self.facts, position, planned(caches), lambda own: [own])
        _register(worker, caches, engine)
        self._workers.append(worker)

    def pull(self, params: Any, tokens: int, blocks: Sequence[int], computed: int = 0) -> set[str]:
        """A request from its arrival to the end of its pulls.

        Returns, over all workers, the reasons of failed pulls.
        """
        asked = request(tokens, params)
        self.scheduler.arrived(asked)
        external = self.scheduler.external_tokens(asked, computed)
        self.scheduler.allocated(asked, list(blocks), external)
        self.step()
        return self.ended(asked.request_id)

    def step(self) -> None:
        """Hand a step's orders to the workers."""
        pulls, cancelled = self.scheduler.take_step()
        for worker in self._workers:
            worker.start(StepMetadata(pulls, cancelled))

    def ended(self, name: str) -> set[str]:
        """Wait until the pull has ended on every worker; the reasons of those that failed."""
        reasons: set[str] = set()
        for worker in self._workers:
            done, failed = eventually(functools.partial(_finished, worker))
            assert done == {name} and failed <= done
            failures = worker.take_stats().failures
            assert failures.total() == len(failed)
            reasons |= set(failures)
        self.scheduler.received({name})
        return reasons

    def invalid_blocks(self) -> set[int]:
        """Blocks that were to be filled and are not, by any worker."""
        return set().union(*(worker.take_invalid_blocks() for worker in self._workers))

    def close(self) -> None:
        """Stop everything."""
        for worker in self._workers:
            worker.close()
        self.scheduler.close()


def planned(caches: Mapping[str, torch.Tensor], layout: RankLayout | None = None) -> CachePlan:
    """The plan that caches of (blocks, ...) fit."""
    [blocks] = {cache.shape[0] for cache in caches.values()}
    sizes = {name: frozenset({cache.nbytes // blocks}) for name, cache in caches.items()}
    return CachePlan(blocks, sizes, layout)


def _register(
    worker: P2pWorker, caches: Mapping[str, torch.Tensor], engine: TransferEngine
) -> None:
    """Give a worker its caches, and an engine of its own in a process that has several."""
    with mock.patch.object(worker_module, "process_engine", lambda host, protocol: engine):
        worker.register(caches)


def _finished(worker: P2pWorker) -> tuple[set[str], set[str]] | None:
    done, failed = worker.finished()
    return (done, failed) if done else None
