"""Both sides of `python -m benchmarks p2p`: a source process as prefill, and decode ranks.

Endpoints, leases and transfer engines are real; there is no model.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from benchmarks.timeouts import ANSWER_S
from benchmarks.worker_process import WorkerProcess, serve_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvpp_connectors.connector.transfer_engine import TransferEngine
    from kvpp_connectors.p2p.messages import PullResult
    from kvpp_connectors.p2p.protocol import Description, Reply, Request, WorkerAddress
    from kvpp_connectors.p2p.transfer_params import TransferParams

__all__ = ["BOUND", "LAYERS", "WINDOW", "DecodeRank", "Shape", "Source"]

HOST, LAYERS, WINDOW, BOUND = "127.0.0.1", 4, 16, 600.0
_SERVED = 1  # every byte of the source
_LOOK = 0.002  # seconds between two polls of a pull's result; in no figure


@dataclass(frozen=True, slots=True)
class Shape:
    """The request that is pulled: ``blocks`` blocks of each layer, from pools of twice as many."""

    block: int  # bytes
    blocks: int
    scattered: bool

    @property
    def pool(self) -> int:
        """Blocks of a layer's pool."""
        return 2 * self.blocks

    @property
    def pool_bytes(self) -> int:
        """Bytes of all layers' pools."""
        return LAYERS * self.pool * self.block

    @property
    def remote(self) -> list[int]:
        """The request's blocks at prefill."""
        chosen = random.Random(0).sample(range(self.pool), self.blocks)
        return sorted(chosen) if self.scattered else list(range(self.blocks))

    @property
    def local(self) -> list[int]:
        """The request's blocks at decode."""
        return list(range(self.blocks))

    @property
    def bytes(self) -> int:
        """Bytes of the whole request."""
        return LAYERS * self.blocks * self.block


class Source(WorkerProcess):
    """The prefill side in a process of its own. One serves all shapes: its start takes seconds."""

    def __init__(self, size: int) -> None:
        """Args:
        size: bytes that it serves.
        """
        super().__init__("the source", _serve, size)

    def use(self, shape: Shape) -> Description:
        """Lay the caches out for ``shape``; the worker's new description."""
        description: Description = self.call(shape)
        return description

    def offer(self) -> TransferParams:
        """Transfer params of a request that is ready to be pulled."""
        offer: TransferParams = self.call("offer")
        return offer


class DecodeRank:
    """One rank of a decode engine; ``readers`` above 1 make it a member of a group that shares."""

    def __init__(self, shape: Shape, reader: int = 0, readers: int = 1) -> None:
        from kvpp_connectors.connector.transfer_engine import TransferEngine
        from kvpp_connectors.p2p.peer_sharing import Sharing
        from kvpp_connectors.p2p.protocol import WorkerAddress
        from kvpp_connectors.p2p.pull_worker import PullSettings, PullWorker
        from kvpp_connectors.p2p.rpc import ControlServer

        self._shape = shape
        self.engine = TransferEngine(HOST, "tcp")
        buffer = _buffer(self.engine, shape.pool_bytes, fill=0)
        self.caches, self.own = _caches(self.engine, buffer, shape, f"rank {reader}")
        settings = PullSettings("decode", reader, readers, None, ANSWER_S, BOUND, WINDOW, 1)
        sharing = Sharing(self.own, None, ANSWER_S, BOUND) if readers > 1 else None
        self._pull_worker: PullWorker = PullWorker(self.own, self.engine, settings, sharing)
        self._server = ControlServer(HOST, 0, None, self._answer, what="decode rank", option="")
        self.address: WorkerAddress = WorkerAddress(HOST, self._server.port, self.own.epoch)

    def start(
        self,
        offer: TransferParams,
        ticket: bytes | None = None,
        group: Sequence[WorkerAddress] = (),
    ) -> None:
        """Begin a pull."""
        from kvpp_connectors.p2p.messages import Pull

        named = {} if ticket is None else {"ticket": ticket}
        shape = self._shape
        self._pull_worker.submit(
            Pull("request", offer, tuple(shape.remote), tuple(shape.local), **named), group
        )

    def result(self) -> PullResult:
        """Wait for the pull.

        Raises:
            RuntimeError: it failed.
            TimeoutError: it did not end.
        """
        deadline = time.monotonic() + BOUND
        while not (results := self._pull_worker.take_results()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the pull did not end within {BOUND:g} s")
            time.sleep(_LOOK)
        [result] = results
        if result.problem is not None:
            raise RuntimeError(f"the pull failed ({result.reason}): {result.problem}")
        return result

    def clear(self) -> None:
        """Zero the caches."""
        for cache in self.caches:
            cache.zero_()

    def check(self) -> None:
        """Check that exactly the request's bytes were read since `clear`.

        Raises:
            RuntimeError: others were.
        """
        local = self._shape.local
        for layer, cache in enumerate(self.caches):
            if not bool((cache[local] == _SERVED).all()) or int(cache.count_nonzero()) != (
                len(local) * self._shape.block
            ):
                raise RuntimeError(f"layer {layer} does not hold exactly the bytes of its source")

    def close(self) -> None:
        """Stop its threads."""
        self._pull_worker.close()
        self._server.close()

    def _answer(self, request: Request) -> Reply:
        from kvpp_connectors.p2p.protocol import Noted, ShareEnded

        if isinstance(request, ShareEnded):
            self._pull_worker.on_peer_status(request)
            return Noted()
        return self.own


def _caches(
    engine: TransferEngine, buffer: torch.Tensor, shape: Shape, epoch: str
) -> tuple[list[torch.Tensor], Description]:
    """All layers' caches in one buffer, and their description."""
    from kvpp_connectors.p2p.protocol import Description
    from kvpp_connectors.p2p.read_plan import cache_regions

    caches = list(buffer[: shape.pool_bytes].view(LAYERS, shape.pool, shape.block))
    regions = cache_regions({f"layer {i}": cache for i, cache in enumerate(caches)})
    return caches, Description(epoch, engine.session, "model", 16, "bytes", regions)


def _buffer(engine: TransferEngine, size: int, fill: int) -> torch.Tensor:
    import torch

    buffer = torch.full((size,), fill, dtype=torch.uint8)
    engine.register(buffer.data_ptr(), buffer.nbytes)
    return buffer


class _Prefill:
    """The source process: a worker's endpoint, a lease endpoint, and their transfers."""

    def __init__(self, size: int) -> None:
        from kvpp_connectors.connector.transfer_engine import TransferEngine
        from kvpp_connectors.p2p.lease import LeaseBook
        from kvpp_connectors.p2p.rpc import ControlServer

        self._engine = TransferEngine(HOST, "tcp")
        self._buffer = _buffer(self._engine, size, _SERVED)
        self._description: Description | None = None
        self._book = LeaseBook(BOUND)
        self._offers = self._shapes = 0
        self._worker = ControlServer(HOST, 0, None, self._describe, what="worker", option="")
        self._lease = ControlServer(HOST, 0, None, self._grant_or_end, what="lease", option="")

    def use(self, shape: Shape) -> Description:
        """Lay the caches out in a new epoch, so that nobody reads at old addresses."""
        self._shapes += 1
        epoch = f"prefill {self._shapes}"
        self._description = _caches(self._engine, self._buffer, shape, epoch)[1]
        return self._description

    def offer(self) -> TransferParams:
        """Transfer params of a request that is ready to be pulled."""
        from kvpp_connectors.p2p.protocol import WorkerAddress
        from kvpp_connectors.p2p.transfer_params import (
            PARAMS_VERSION,
            TransferLease,
            TransferParams,
        )

        assert self._description is not None
        self._offers += 1
        name = f"transfer {self._offers}"
        generation = self._book.grant(name, name, time.monotonic())
        workers = [WorkerAddress(HOST, self._worker.port, self._description.epoch)]
        details = TransferLease(PARAMS_VERSION, name, generation, workers)
        return TransferParams("source", HOST, self._lease.port, [[]], 0, 16, details)

    def close(self) -> None:
        """Stop answering."""
        self._worker.close()
        self._lease.close()

    def _describe(self, _: Request) -> Reply:
        assert self._description is not None
        return self._description

    def _grant_or_end(self, request: Request) -> Reply:
        from kvpp_connectors.p2p.lease import answer

        return answer(self._book, request, BOUND, time.monotonic())


def _serve(parent: Connection, size: int) -> None:
    prefill = _Prefill(size)
    serve_calls(parent, lambda q: prefill.use(q) if isinstance(q, Shape) else prefill.offer())
    prefill.close()
