"""Decode ranks that share a pull: each byte comes from prefill once, and lands on every rank.

Real workers, control ports, leases and Transfer Engines. Whatever one rank does (fails, is silent,
gives up, is aborted), every rank ends in bounded time, with all bytes or with a failure.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_connectors.connector.transfer_engine import Read, TransferEngine
from kvpp_connectors.p2p.messages import StepMetadata, WorkerHandshake
from kvpp_connectors.p2p.peer_sharing import PeerStatus
from kvpp_connectors.p2p.protocol import Noted, Refused, Region, ShareEnded
from kvpp_connectors.p2p.read_plan import split_shares
from kvpp_connectors.p2p.rpc import ControlClient
from kvpp_connectors.p2p.worker import P2pWorker
from tests.core.rank_memory import UNALIGNED
from tests.p2p.conftest import Machine
from tests.p2p.kv_memory import KvMemory, laid_out
from tests.p2p.sides import BLOCK_SIZE, PATIENCE, Decode, engine_facts, eventually, request
from tests.p2p.test_byte_grid import (
    BLOCKS,
    DECODE_BLOCKS,
    TOKENS,
    Running,
    Side,
    expect,
    kept,
    prefilled,
)

LONG = 60.0  # seconds, a wait that a test must not sit out
SHORT = 0.3
REMOTE, LOCAL, _ = BLOCKS[1]  # scattered
SINGLE, PAIR = Side(), Side(tp=2)


@dataclass
class Watched:
    """A real engine that counts bytes by session, and whose reads a test can change or hold."""

    engine: TransferEngine
    change: Callable[[Read, int], Read] = lambda read, number: read
    held: threading.Event | None = None
    bytes: Counter[str] = field(default_factory=Counter)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    reached: threading.Event = field(default_factory=threading.Event)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def start_read(self, read: Read) -> int | None:
        """Submit it, changed, when it is let through."""
        self.reached.set()
        assert self.held is None or self.held.wait(PATIENCE)
        self.bytes[read.session] += read.size
        return self.engine.start_read(self.change(read, next(self.numbers)))


class Group(Decode):
    """A decode engine whose ranks share; they have their transfer engines to themselves."""

    def __init__(self, side: Side, machine: Machine, **options: Any) -> None:
        self.side = side
        options = {"share_pulls": True, "share_wait_s": LONG, **options}
        super().__init__(engine_facts("decode", pp=side.pp, tp=side.tp, options=options))
        self.memories: list[KvMemory] = []
        self.engines: list[Watched] = []
        handshakes: dict[tuple[int, ...], WorkerHandshake] = {}
        for number, ranks, placement in side.workers():
            memory = laid_out(placement, DECODE_BLOCKS, UNALIGNED, side.interleaved)
            memory.use(machine.decode_arenas[number])
            self.memories.append(memory)
            engine = Watched(machine.prefill[-1 - number])
            self.engines.append(engine)
            self.add_worker(
                ranks,
                {name: memory.of(name) for name in kept(placement)},
                engine,  # type: ignore[arg-type]
            )
            handshake = self._workers[-1].handshake()
            assert handshake is not None
            handshakes[ranks.pp, ranks.tp] = handshake
        self.scheduler.set_handshakes(handshakes)

    @property
    def workers(self) -> list[P2pWorker]:
        """By rank."""
        return self._workers

    def step(self) -> None:
        """As the connector does."""
        pulls, cancelled = self.scheduler.take_step()
        for worker in self._workers:
            worker.start(StepMetadata(pulls, cancelled, groups=self.scheduler.groups))

    def begin(self, params: Any) -> Any:
        """Start a request's pull."""
        asked = request(TOKENS, params)
        self.scheduler.arrived(asked)
        external = self.scheduler.external_tokens(asked, 0)
        self.scheduler.allocated(asked, list(LOCAL), external)
        self.step()
        return asked

    def end_of(self, rank: int) -> dict[str, Any]:
        """Wait for the end of one rank's pull; its counters."""
        worker = self._workers[rank]
        eventually(lambda: worker.finished()[0])
        stats = worker.take_stats()
        assert stats.pulls + stats.failures.total() == 1
        return {**stats.to_dict(), "failed": list(stats.failures)}

    def assert_pulled(self, prefill: Running) -> None:
        """Every rank holds every byte, nothing else was touched, and no block is invalid."""
        for memory in self.memories:
            expect(memory, self.side, prefill, LOCAL, REMOTE)
            assert memory.difference() == []
        assert self.invalid_blocks() == set()

    def assert_quiet(self) -> None:
        """Nothing writes any more: what is overwritten stays so."""
        for memory in self.memories:
            memory.reset()
        threading.Event().wait(0.1)
        assert all(memory.difference() == [] for memory in self.memories)


@contextlib.contextmanager
def sides(
    machine: Machine, prefill: Side = SINGLE, decode: Side = PAIR, **options: Any
) -> Iterator[tuple[Running, Group]]:
    """Both engines. ``prefill`` may have two workers: the others' engines are decode's."""
    with prefilled(prefill, machine) as running:
        group = Group(decode, machine, **options)
        try:
            yield running, group
        finally:
            for engine in group.engines:
                if engine.held is not None:
                    engine.held.set()
            group.close()


def sessions(machine: Machine) -> tuple[str, str]:
    """Of the two prefill workers' engines."""
    return machine.prefill[0].session, machine.prefill[1].session


def from_prefill(engine: Watched, machine: Machine) -> int:
    """Bytes that a rank asked of prefill."""
    return sum(engine.bytes[session] for session in sessions(machine))


def wait_for_all(worker: P2pWorker, names: set[str]) -> None:
    """Wait for the end of several pulls on one rank."""
    done: set[str] = set()

    def all_there() -> bool:
        done.update(worker.finished()[0])
        return done >= names

    eventually(all_there)
    assert done == names


def total_bytes(memory: KvMemory) -> int:
    """Bytes of the request on a rank."""
    return sum(row.block_bytes for row in memory.rows.values()) * len(LOCAL)


@pytest.mark.parametrize("kvpp", [False, True], ids=["replicated", "kvpp"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["by layer", "interleaved"])
def test_every_rank_gets_every_byte_and_prefill_sends_each_once(
    kvpp: bool, interleaved: bool, machine: Machine
) -> None:
    """For all lists of blocks; about half of the bytes on each rank; the lease ends as read."""
    side = replace(PAIR, interleaved=interleaved)
    with sides(machine, Side(tp=2, kvpp=kvpp), side) as (prefill, decode):
        for remote, local, computed in BLOCKS:
            params = prefill.engine.offer(TOKENS, remote)
            assert decode.pull(params, TOKENS, local, computed) == set()
            first = computed // BLOCK_SIZE
            for memory in decode.memories:
                expect(memory, side, prefill, local[first:], remote[first:])
                assert memory.difference() == []
                memory.reset()
            assert prefill.engine.let_go() == [params["kvpp"]["transfer_id"]]
            total = total_bytes(decode.memories[0]) * (len(local) - first) // len(local)
            loads = [from_prefill(engine, machine) for engine in decode.engines]
            assert sum(loads) == total
            assert max(loads) < 0.6 * total
            for engine in decode.engines:
                assert engine.bytes.total() == total
                engine.bytes.clear()
        assert decode.invalid_blocks() == set()


def test_stages_share_among_themselves(machine: Machine) -> None:
    """PP2 x TP2 at decode: two groups, each with its own layers."""
    side = Side(pp=2, tp=2, split=(1, 4))
    machine = machine._replace(prefill=(*machine.prefill, *machine.prefill[1:]))
    with sides(machine, Side(), side) as (prefill, decode):
        decode.begin(prefill.engine.offer(TOKENS, REMOTE))
        counts = [decode.end_of(rank) for rank in range(4)]
        decode.assert_pulled(prefill)
        for pair in (counts[:2], counts[2:]):
            assert pair[0]["pull_bytes"] == pair[1]["pull_shared_bytes"] > 0
            assert pair[1]["pull_bytes"] == pair[0]["pull_shared_bytes"] > 0


def bad_after(count: int, session: str) -> Callable[[Read, int], Read]:
    """Reads of ``session`` go to an address that it does not serve, from the n-th on."""
    seen = itertools.count()

    def change(read: Read, number: int) -> Read:
        bad = read.session == session and next(seen) >= count
        return replace(read, remote=4096) if bad else read

    return change


@pytest.mark.parametrize("after", [0, 5])
def test_a_share_that_cannot_be_read_comes_from_prefill(after: int, machine: Machine) -> None:
    """Also where a part of it was read; the other rank, which reads well, notices nothing."""
    with sides(machine) as (prefill, decode):
        session = decode.engines[1].engine.session
        decode.engines[0].change = bad_after(after, session)
        decode.begin(prefill.engine.offer(TOKENS, REMOTE))
        first, second = decode.end_of(0), decode.end_of(1)
        decode.assert_pulled(prefill)
        assert first["pull_bytes"] == total_bytes(decode.memories[0])
        assert (first["pull_shares_not_taken"], second["pull_shares_not_taken"]) == (1, 0)
        assert len(prefill.engine.let_go()) == 1


def test_a_silent_rank_is_waited_for_in_bounds_and_then_not_at_all(machine: Machine) -> None:
    """Its share comes from prefill; of the next pull it is not waited for. It ends well itself."""
    with sides(machine, share_wait_s=SHORT) as (prefill, decode):
        decode.engines[1].held = threading.Event()
        waited, names = [], set()
        for _ in range(2):
            started = time.monotonic()
            names.add(decode.begin(prefill.engine.offer(TOKENS, REMOTE)).request_id)
            first = decode.end_of(0)
            waited.append(time.monotonic() - started)
            assert first["pull_shares_not_taken"] == 1 and first["failed"] == []
            decode.memories[1].reset()
            decode.memories[0].reset()
        assert waited[0] >= SHORT and max(waited) < LONG / 4
        decode.engines[1].held.set()
        wait_for_all(decode.workers[1], names)
        eventually(lambda: len(prefill.engine.scheduler.pop_released()))
        assert decode.workers[1].take_invalid_blocks() == set()


def test_a_rank_whose_endpoint_is_dead_costs_its_bound(machine: Machine) -> None:
    """Neither is it heard, nor does it hear: both ranks pull what they lack from prefill."""
    with sides(machine, share_wait_s=SHORT, control_timeout_s=SHORT) as (prefill, decode):
        server = decode.workers[1]._server
        assert server is not None
        server.close()
        decode.begin(prefill.engine.offer(TOKENS, REMOTE))
        counts = [decode.end_of(0), decode.end_of(1)]
        decode.assert_pulled(prefill)
        assert [count["pull_shares_not_taken"] for count in counts] == [1, 1]


def test_a_rank_that_keeps_other_caches_is_not_read(machine: Machine) -> None:
    """Other names or sizes would make other shares."""
    with sides(machine) as (prefill, decode):
        description = decode.workers[1]._description
        assert description is not None
        odd = [*description.regions[1:], description.regions[0]]
        decode.workers[1]._description = type(description)(
            **{name: getattr(description, name) for name in description.__struct_fields__}
            | {"regions": odd}
        )
        decode.begin(prefill.engine.offer(TOKENS, REMOTE))
        counts = [decode.end_of(0), decode.end_of(1)]
        decode.assert_pulled(prefill)
        assert [count["pull_shares_not_taken"] for count in counts] == [1, 0]


def test_a_rank_that_gives_up_ends_the_others_at_once(machine: Machine) -> None:
    """The request is lost anyway: nobody waits, no block is valid, the lease is released."""
    with sides(machine) as (prefill, decode):
        decode.engines[1].change = bad_after(0, sessions(machine)[0])
        started = time.monotonic()
        decode.begin(prefill.engine.offer(TOKENS, REMOTE))
        failed = [decode.end_of(rank)["failed"] for rank in range(2)]
        assert failed == [["peer"], ["read"]]
        assert time.monotonic() - started < LONG / 2
        for worker in decode.workers:
            assert worker.take_invalid_blocks() == set(LOCAL)
        assert len(prefill.engine.let_go()) == 1
        decode.assert_quiet()
        decode.engines[1].change = Watched.change
        decode.begin(prefill.engine.offer(TOKENS, REMOTE))
        assert [decode.end_of(rank)["failed"] for rank in range(2)] == [[], []]
        decode.assert_pulled(prefill)


def test_an_abort_ends_a_rank_that_waits(machine: Machine) -> None:
    """At once, although the other rank has said nothing; that one ends when its read does."""
    with sides(machine) as (prefill, decode):
        decode.engines[1].held = threading.Event()
        asked = decode.begin(prefill.engine.offer(TOKENS, REMOTE))
        assert decode.engines[1].reached.wait(PATIENCE)
        eventually(lambda: decode.engines[0].bytes.total())
        decode.scheduler.ended(asked)
        decode.step()
        assert decode.end_of(0)["failed"] == ["cancelled"]
        assert decode.workers[1].finished() == (set(), set())
        decode.engines[1].held.set()
        assert decode.end_of(1)["failed"] == ["cancelled"]
        decode.assert_quiet()
        assert len(prefill.engine.let_go()) == 1


def test_a_lease_that_ends_while_ranks_share_makes_all_bytes_void(machine: Machine) -> None:
    """S3: one rank has its share in time; nothing that anybody read counts."""
    with sides(machine, share_wait_s=SHORT) as (prefill, decode):
        decode.engines[1].held = threading.Event()
        params = prefill.engine.offer(TOKENS, REMOTE)
        decode.begin(params)
        eventually(lambda: decode.engines[0].bytes.total())
        scheduler = prefill.engine.scheduler
        with scheduler._lock:
            scheduler._book.expire(time.monotonic() + 1e6)
        assert decode.end_of(0)["failed"] == ["gone"]
        decode.engines[1].held.set()
        assert decode.end_of(1)["failed"][0] in ("gone", "peer")
        assert decode.invalid_blocks() == set(LOCAL)


def test_ranks_that_pull_in_opposite_order_do_not_wait_for_ever(machine: Machine) -> None:
    """One thread each: rank 0 waits for A, rank 1 for B. The bound parts them."""
    with sides(machine, share_wait_s=SHORT, threads=1) as (prefill, decode):
        for name in "ab":
            asked = request(TOKENS, prefill.engine.offer(TOKENS, REMOTE, name), name)
            decode.scheduler.arrived(asked)
            decode.scheduler.allocated(asked, list(LOCAL), TOKENS)
        pulls, _ = decode.scheduler.take_step()
        for worker, order in zip(decode.workers, (pulls, pulls[::-1]), strict=True):
            worker.start(StepMetadata(order, groups=decode.scheduler.groups))
        for worker in decode.workers:
            wait_for_all(worker, {"a", "b"})
            assert worker.take_stats().failures.total() == 0
        decode.assert_pulled(prefill)


def test_many_pulls_at_once(machine: Machine) -> None:
    """Threads of both ranks finish in any order; nothing is taken before it is there."""
    with sides(machine, share_wait_s=10.0) as (prefill, decode):
        names = [f"many-{number}" for number in range(40)]
        for name in names:
            asked = request(TOKENS, prefill.engine.offer(TOKENS, REMOTE, name), name)
            decode.scheduler.arrived(asked)
            decode.scheduler.allocated(asked, list(LOCAL), TOKENS)
        decode.step()
        for worker in decode.workers:
            wait_for_all(worker, set(names))
            stats = worker.take_stats()
            assert (stats.pulls, stats.shares_not_taken) == (len(names), 0)
            assert worker._pull_worker is not None and worker._pull_worker._sharing is not None
            status = worker._pull_worker._sharing.status
            assert status._known == {}
        decode.assert_pulled(prefill)


def test_a_stranger_cannot_say_that_a_share_is_there(machine: Machine) -> None:
    """Words are counted by a ticket that only this engine's ranks know."""
    with sides(machine) as (prefill, decode):
        decode.engines[1].held = threading.Event()
        decode.begin(prefill.engine.offer(TOKENS, REMOTE))
        assert decode.engines[1].reached.wait(PATIENCE)
        address = decode.scheduler.groups[0][0]
        client = ControlClient(address.host, address.port, None, PATIENCE)
        for number in range(5000):
            assert client.ask(ShareEnded(number.to_bytes(16), 1, None)) == Noted()
        client.close()
        assert decode.workers[0].finished() == (set(), set())
        pull_worker = decode.workers[0]._pull_worker
        assert pull_worker is not None and pull_worker._sharing is not None
        assert len(pull_worker._sharing.status._early) == 4096
        decode.engines[1].held.set()
        assert [decode.end_of(rank)["failed"] for rank in range(2)] == [[], []]
        decode.assert_pulled(prefill)


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=60), members=st.integers(1, 9))
def test_shares_are_even_and_complete(sizes: list[int], members: int) -> None:
    """Each component is in one share; no share exceeds another by more than a component."""
    regions = [Region(f"layer {i}", 1, size, size, 4) for i, size in enumerate(sizes)]
    shares = split_shares(regions, members)
    assert len(shares) == members
    assert sorted(r.name for share in shares for r in share) == sorted(r.name for r in regions)
    loads = [sum(r.block_bytes for r in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes)


def test_words_may_come_early_twice_and_late() -> None:
    """The first one counts; words of a pull that has ended change nothing."""
    status, ticket = PeerStatus(), bytes(16)
    status.note(ShareEnded(ticket, 1, None))
    status.expect(ticket)
    status.note(ShareEnded(ticket, 1, "read"))
    assert status.wait(ticket, [1, 2], time.monotonic() + LONG, lambda: None) == {1: None}
    assert status.wait(ticket, [2], time.monotonic(), lambda: None) == {}
    assert status.wait(ticket, [2], time.monotonic() + LONG, lambda: "aborted") == {}
    status.drop(ticket)
    status.note(ShareEnded(ticket, 2, None))
    assert status.wait(ticket, [1, 2], time.monotonic(), lambda: None) == {}


@pytest.mark.parametrize("tp", [1, 2])
def test_it_is_off_unless_it_is_asked_for_and_there_is_a_group(tp: int, machine: Machine) -> None:
    """No port is opened, nothing is told to the scheduler."""
    options = {"share_pulls": tp == 1}
    with contextlib.closing(Decode(engine_facts("decode", tp=tp, options=options))) as decode:
        memory = laid_out(next(Side().workers())[2], DECODE_BLOCKS, UNALIGNED, False)
        memory.use(machine.decode_arenas[0])
        ranks = next(Side().workers())[1]
        decode.add_worker(ranks, {"x": memory.of("layers.0.attn")}, machine.decode)
        [worker] = decode._workers
        assert worker.handshake() is None and worker._server is None
        assert isinstance(worker._answer(ShareEnded(bytes(16), 0, None)), Refused)
