"""`kvpp bench p2p`: what a pull costs, against the transfer engine alone and against memcpy.

A source process plays the prefill side with real endpoints and a real transfer engine, this one the
decode side. All ways move the same bytes, in turns, in one run: only ratios are of use.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from kvpp_connectors.p2p.puller import Pull, Puller
    from kvpp_connectors.p2p.wire import Description
    from kvpp_connectors.transport import Read, TransferEngine

__all__ = ["P2pTiming", "bench_p2p"]

_HOST, _LAYERS, _WINDOW, _BOUND = "127.0.0.1", 4, 16, 120.0
_SIZES_KIB = (16, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class P2pTiming:
    """Median seconds of one case, by way."""

    case: str
    block_kib: int
    megabytes: float
    memcpy: float
    raw_windowed: float  # the same reads, submitted one by one, a window of them
    raw_batch: float  # the same reads in one synchronous batch
    pull: float

    @property
    def raw(self) -> float:
        """The better way of the transfer engine."""
        return min(self.raw_windowed, self.raw_batch)


def bench_p2p(
    megabytes: Annotated[int, typer.Option(min=1, help="Bytes of one pull, MiB.")] = 64,
    repeats: Annotated[int, typer.Option(min=3, help="Pulls per figure.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time a pull over tcp on this machine against the same reads without the protocol."""
    timings = [
        _time_case(kib, scattered, megabytes << 20, repeats)
        for kib in _SIZES_KIB
        for scattered in (False, True)
    ]
    if as_json:
        rows = [{**asdict(t), "pull_to_raw_goodput": t.raw / t.pull} for t in timings]
        typer.echo(json.dumps(rows, indent=2))
    else:
        Console().print(_table(timings))


def _time_case(block_kib: int, scattered: bool, size: int, repeats: int) -> P2pTiming:
    block = block_kib << 10
    blocks = max(1, size // block // _LAYERS)
    here, there = multiprocessing.Pipe()
    source = multiprocessing.get_context("spawn").Process(
        target=_source, args=(there, block, 2 * blocks)
    )
    source.start()
    try:
        bench = _Bench(here, block, 2 * blocks, blocks, scattered)
        seconds = _in_turns(bench.ways(), repeats)
        bench.close()
    finally:
        here.send("end")
        source.join(_BOUND)
        source.kill()
    return P2pTiming(
        case="scattered blocks" if scattered else "one run of blocks",
        block_kib=block_kib,
        megabytes=blocks * _LAYERS * block / 1e6,
        **seconds,
    )


def _in_turns(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if turn > 0:  # the first one warms up
                samples[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in samples.items()}


class _Bench:
    """The decode side: the ways to move the same bytes."""

    def __init__(
        self, source: Connection, block: int, pool: int, blocks: int, scattered: bool
    ) -> None:
        from kvpp_connectors.p2p.plan import choose_sources, plan_reads
        from kvpp_connectors.p2p.puller import Puller, PullerSettings
        from kvpp_connectors.transport import TransferEngine

        self._source = source
        self._engine = TransferEngine(_HOST, "tcp")
        self._caches, own = _caches(self._engine, block, pool)
        self._puller: Puller = Puller(
            own,
            self._engine,
            PullerSettings("decode", 0, 1, None, 5.0, _BOUND, _WINDOW, 1),
        )
        chosen = range(blocks)
        numbers = random.Random(0)
        self._remote = sorted(numbers.sample(range(pool), blocks)) if scattered else list(chosen)
        self._local = list(chosen)
        self._copy = self._caches[0][:blocks].clone()
        peer = self._ask("describe")
        self._reads: list[Read] = plan_reads(
            own.regions, choose_sources(own, [peer]), self._remote, self._local
        )

    def ways(self) -> dict[str, Callable[[], object]]:
        """Every way by name."""
        return {
            "memcpy": self._memcpy,
            "raw_windowed": self._raw_windowed,
            "raw_batch": self._raw_batch,
            "pull": self._pull,
        }

    def close(self) -> None:
        """End the puller's threads."""
        self._puller.close()

    def _ask(self, what: str) -> Any:
        self._source.send(what)
        return self._source.recv()

    def _memcpy(self) -> None:
        import torch

        rows = torch.tensor(self._remote)
        for cache in self._caches:
            torch.index_select(cache, 0, rows, out=self._copy)

    def _raw_windowed(self) -> None:
        from kvpp_connectors.p2p.reads import read_all

        outcome = read_all(self._engine, self._reads, _WINDOW, lambda: None)
        assert outcome.problem is None, outcome.problem

    def _raw_batch(self) -> None:
        engine = self._engine.raw
        reads = self._reads
        code = engine.batch_transfer_sync_read(
            reads[0].session,
            [read.local for read in reads],
            [read.remote for read in reads],
            [read.size for read in reads],
        )
        assert code == 0, code

    def _pull(self) -> None:
        from kvpp_connectors.p2p.puller import Pull

        offer = self._ask("grant")
        pull: Pull = Pull("request", offer, tuple(self._remote), tuple(self._local))
        self._puller.submit(pull)
        deadline = time.monotonic() + _BOUND
        while not (results := self._puller.take_results()):
            assert time.monotonic() < deadline, "the pull did not end"
            time.sleep(0.0002)
        assert results[0].problem is None, results[0].problem


def _caches(engine: TransferEngine, block: int, pool: int) -> tuple[list[Any], Description]:
    """``_LAYERS`` caches in one registered buffer, and their description."""
    import torch

    from kvpp_connectors.p2p.caches import cache_regions
    from kvpp_connectors.p2p.wire import Description

    buffer = torch.ones(_LAYERS * pool * block, dtype=torch.uint8)
    engine.register(buffer.untyped_storage())
    caches = list(buffer.view(_LAYERS, pool, block))
    regions = cache_regions({f"layer {i}": cache for i, cache in enumerate(caches)})
    return caches, Description("epoch", engine.session, "model", 16, "bytes", regions)


def _source(parent: Connection, block: int, pool: int) -> None:
    """The prefill side: a worker's endpoint, a lease endpoint, and offers on request."""
    from kvpp_connectors.p2p.control import ControlServer
    from kvpp_connectors.p2p.judge import judge
    from kvpp_connectors.p2p.lease import LeaseBook
    from kvpp_connectors.p2p.offer import OFFER_VERSION, Offer, OfferDetails
    from kvpp_connectors.p2p.wire import WorkerAddress
    from kvpp_connectors.transport import TransferEngine

    engine = TransferEngine(_HOST, "tcp")
    _, description = _caches(engine, block, pool)
    book = LeaseBook(_BOUND)
    worker = ControlServer(_HOST, 0, None, lambda _: description, what="worker", option="")
    lease = ControlServer(
        _HOST,
        0,
        None,
        lambda request: judge(book, request, _BOUND, time.monotonic()),
        what="lease",
        option="",
    )
    offers = 0
    while (asked := parent.recv()) != "end":
        if asked == "describe":
            parent.send(description)
            continue
        offers += 1
        name = f"transfer {offers}"
        generation = book.grant(name, name, time.monotonic())
        details = OfferDetails(
            OFFER_VERSION, name, generation, [WorkerAddress(_HOST, worker.port, "epoch")]
        )
        parent.send(Offer("source", _HOST, lease.port, [[]], 0, 16, details))
    worker.close()
    lease.close()


def _table(timings: list[P2pTiming]) -> Table:
    table = Table(
        "blocks of",
        "case",
        "MB",
        "raw, GB/s",
        "pull, GB/s",
        "pull / raw",
        "pull / memcpy",
        title=f"{_LAYERS} layers over tcp on {_HOST}; raw: the transfer engine's better way",
    )
    for timing in timings:
        table.add_row(
            f"{timing.block_kib} KiB",
            timing.case,
            f"{timing.megabytes:.0f}",
            f"{timing.megabytes / timing.raw / 1e3:.2f}",
            f"{timing.megabytes / timing.pull / 1e3:.2f}",
            f"{timing.raw / timing.pull:.2f}",
            f"{timing.memcpy / timing.pull:.2f}",
        )
    return table
