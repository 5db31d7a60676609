"""A real prefill worker and pulls from it, with a gate before one of the reads."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

from kvpp_connectors.connector.facts import RankPosition
from kvpp_connectors.connector.transfer_engine import Read, TransferEngine
from kvpp_connectors.p2p.messages import Pull, PullResult
from kvpp_connectors.p2p.protocol import Description
from kvpp_connectors.p2p.pull_worker import PullSettings, PullWorker
from kvpp_connectors.p2p.read_plan import cache_regions
from kvpp_connectors.p2p.read_window import ReadEngine
from kvpp_connectors.p2p.transfer_params import read_params
from kvpp_core.layout import Placement
from tests.core.rank_memory import ALIGNED, UNALIGNED, uneven_model
from tests.p2p.conftest import Machine
from tests.p2p.kv_memory import laid_out
from tests.p2p.sides import BLOCK_SIZE, PATIENCE, Prefill, engine_facts, eventually

__all__ = [
    "LOCAL",
    "REMOTE",
    "TIMEOUT",
    "WORKER",
    "Gate",
    "HeldReads",
    "ReadFault",
    "Rig",
    "held_reads",
    "rig",
]

ReadFault = Literal["refused", "failed", "given up"]
EARLY = 0.2  # seconds in which what must not happen yet is given the chance to

BUNDLES, DRAFTS = uneven_model(2)[:2]
PLACEMENT = Placement(BUNDLES, (0, 0), 1, 0, DRAFTS)
TOKENS = 4 * BLOCK_SIZE
REMOTE, LOCAL = (1, 3, 5, 7), (8, 2, 9, 4)  # scattered: a read for each block and component
TIMEOUT = 0.5  # seconds, of one control message
WORKER = RankPosition()


class Gate:
    """A real engine whose n-th read (from 0) waits until the gate is opened."""

    def __init__(self, engine: ReadEngine, closed_at: int | None) -> None:
        self._engine, self._closed_at = engine, closed_at
        self._numbers = itertools.count()
        self.reached, self._opened = threading.Event(), threading.Event()

    def open(self) -> None:
        """Let the read through."""
        self._opened.set()

    def start_read(self, read: Read) -> int | None:
        """Submit it, when the gate is open."""
        if next(self._numbers) == self._closed_at:
            self.reached.set()
            assert self._opened.wait(PATIENCE)
        return self._engine.start_read(read)

    def poll(self, handle: int) -> bool | None:
        """As the engine."""
        return self._engine.poll(handle)


class Rig:
    """A prefill engine with one worker, and a pull_worker of one decode worker."""

    def __init__(
        self,
        machine: Machine,
        closed_at: int | None,
        lease: float,
        through: Callable[[ReadEngine], ReadEngine],
        **changes: Any,
    ) -> None:
        self.machine = machine
        self.remote = laid_out(PLACEMENT, 10, ALIGNED, interleaved=False)
        self.remote.use(machine.arenas[0])
        self.remote.overwrite(range(10), writer=0, generation=1)
        self.local = laid_out(PLACEMENT, 10, UNALIGNED, interleaved=False)
        self.local.use(machine.decode_arenas[0])
        options = {"lease_seconds": lease}
        self.prefill = Prefill(engine_facts("prefill", options=options))
        self.add_worker(machine.prefill[0])
        self.gate = Gate(through(machine.decode), closed_at)
        regions = cache_regions({name: self.local.of(name) for name in self.local.rows})
        facts = self.prefill.facts
        self.own = Description(
            "decode",
            "none",
            facts.model,
            facts.engine.block_size,
            facts.engine.kv_cache_dtype,
            regions,
        )
        settings: dict[str, Any] = {
            "engine_id": "D", "reader": 0, "readers": 1, "key": None, "window": 4, "threads": 4,
            "control_timeout": TIMEOUT, "pull_timeout": PATIENCE,
        }  # fmt: skip
        self.pull_worker = PullWorker(self.own, self.gate, PullSettings(**(settings | changes)))

    def add_worker(self, engine: TransferEngine) -> None:
        """Start the prefill worker, or start it anew with another epoch."""
        caches = {name: self.remote.of(name) for name in self.remote.rows}
        self.prefill.add_worker(WORKER, caches, engine)

    def pull(self, name: str, params: dict[str, Any] | None = None) -> Pull:
        """A pull of a prefilled request, by default of a new one."""
        return Pull(name, read_params(params or self.offer()), REMOTE, LOCAL)

    def offer(self) -> dict[str, Any]:
        """A request that was prefilled into REMOTE."""
        return self.prefill.offer(TOKENS, REMOTE)

    def result(self) -> PullResult:
        """The next result, which is the only one."""
        [result] = eventually(self.pull_worker.take_results)
        assert isinstance(result, PullResult)
        return result

    def results(self, count: int) -> list[PullResult]:
        """The next results, as soon as there are ``count``."""
        results: list[PullResult] = []

        def enough() -> bool:
            results.extend(self.pull_worker.take_results())
            return len(results) >= count

        eventually(enough)
        return results

    def now(self, name: str, params: dict[str, Any] | None = None) -> PullResult:
        """A pull from its start to its result."""
        self.pull_worker.submit(self.pull(name, params))
        return self.result()

    def assert_pulled(self, generation: int = 1) -> None:
        """The blocks hold the request's KV, and nothing else was touched."""
        for name in self.local.rows:
            self.local.expect(name, LOCAL, REMOTE, [0], generation)
        assert self.local.difference() == []

    def assert_blocks_may_be_given_away(self) -> None:
        """Whoever gets them now sees no byte change."""
        self.local.reset()
        threading.Event().wait(EARLY)
        assert self.local.difference() == []

    def close(self) -> None:
        """Stop everything."""
        self.gate.open()
        self.pull_worker.close()
        self.prefill.close()


class HeldReads:
    """A real engine that accepts its first reads, and does them only when it is told to.

    The read after them goes wrong, if it is to.
    """

    def __init__(self, engine: ReadEngine, held: int, fault: ReadFault | None) -> None:
        self._engine, self._count, self._fault = engine, held, fault
        self._held: list[Read] = []
        self._handles: dict[int, int | None] = {}  # of the engine, by our own; None: not yet
        self.all_held = threading.Event()

    def start_read(self, read: Read) -> int | None:
        """Accept it."""
        if len(self._held) == self._count and self._fault == "refused":
            return None
        number = len(self._held)
        self._held.append(read)
        self._handles[number] = None
        if len(self._held) >= self._count + (self._fault == "failed"):
            self.all_held.set()
        return number

    def poll(self, handle: int) -> bool | None:
        """As the engine, once it has the read."""
        if handle == self._count and self._fault == "failed":
            return False
        started = self._handles[handle]
        return None if started is None else self._engine.poll(started)

    def let_go(self, number: int) -> None:
        """Do a read, to its end."""
        handle = self._engine.start_read(self._held[number])
        assert handle is not None
        self._handles[number] = handle

    def let_go_one_by_one(self, nothing_came: Callable[[], bool]) -> None:
        """Do what is held, and see that before each of them nothing has come of the pull."""
        assert self.all_held.wait(PATIENCE)
        for number in range(self._count):
            threading.Event().wait(EARLY)
            assert nothing_came(), "the pull ended while a read could still write"
            self.let_go(number)


@contextlib.contextmanager
def rig(
    machine: Machine,
    closed_at: int | None = None,
    lease: float = PATIENCE,
    through: Callable[[ReadEngine], ReadEngine] = lambda engine: engine,
    **changes: Any,
) -> Iterator[Rig]:
    """Both sides; nothing is in flight in the end, and no result is left over.

    ``closed_at`` is the number of a read (from 0) that waits at the gate, ``through`` wraps the
    engine of the decode side, ``changes`` are those of its PullSettings.
    """
    made = Rig(machine, closed_at, lease, through, **changes)
    with contextlib.closing(made):
        yield made
        assert made.pull_worker.take_results() == []
        assert made.pull_worker.in_flight == 0


@contextlib.contextmanager
def held_reads(
    machine: Machine, held: int, fault: ReadFault | None, **changes: Any
) -> Iterator[tuple[Rig, HeldReads]]:
    """A rig whose first pull meets `HeldReads`."""
    engines: list[HeldReads] = []

    def through(engine: ReadEngine) -> ReadEngine:
        engines.append(HeldReads(engine, held, fault))
        return engines[0]

    with rig(machine, through=through, **changes) as both:
        yield both, engines[0]
