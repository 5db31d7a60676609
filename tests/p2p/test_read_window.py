"""Reads end before `read_all` returns: after that nothing writes to local memory any more.

Property S1: no block is handed out while a read into it is not terminal. Field reports 2.1 (a peer
is killed or stands still) and the Transfer Engine's trap that a failed call says nothing about its
other parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpp_connectors.connector.transfer_engine import Read
from kvpp_connectors.p2p.read_window import ReadOutcome, read_all
from tests.p2p.conftest import Machine
from tests.p2p.reading_process import CHUNK, EMPTY, Local, local_for, reading_process
from tests.p2p.serving_process import PATTERN, Server, serving_process
from tests.p2p.sides import PATIENCE

CHUNKS = 48


def forever() -> None:
    """No reason to stop."""


@dataclass
class SimulatedEngine:
    """NOT a transfer engine: it counts, and ends each read after so many looks as it was told.

    ``script[i]`` is the fate of the i-th read: (looks until it ends, whether it succeeds), None if
    it is not accepted, or an exception that its submission raises.
    """

    script: list[tuple[int, bool] | Exception | None]
    submitted: list[Read] = field(default_factory=list)
    running: dict[int, tuple[int, bool]] = field(default_factory=dict)
    most: int = 0
    failed: bool = False
    after_failure: int = 0

    def start_read(self, read: Read) -> int | None:
        """Accept it, or not."""
        fate = self.script[len(self.submitted)]
        self.submitted.append(read)
        self.after_failure += self.failed
        if fate is None or isinstance(fate, Exception):
            self.failed = True
            if fate is not None:
                raise fate
            return None
        handle = len(self.submitted)
        self.running[handle] = fate
        self.most = max(self.most, len(self.running))
        return handle

    def poll(self, handle: int) -> bool | None:
        """A look; after the end a handle may not be looked at again."""
        looks, good = self.running[handle]
        if looks:
            self.running[handle] = looks - 1, good
            return None
        del self.running[handle]
        self.failed = self.failed or not good
        return good


def simulated_reads(count: int) -> list[Read]:
    """Reads of 1, 2, 3 ... bytes, which only a simulated engine may get."""
    return [Read("peer:1", 0, 0, number + 1) for number in range(count)]


FATES = st.tuples(st.integers(0, 4), st.sampled_from([True] * 9 + [False])) | st.sampled_from(
    [(0, True)] * 20 + [None, TypeError("a number that no address can be")]
)


@settings(max_examples=300, deadline=None)
@given(script=st.lists(FATES, max_size=40), window=st.integers(1, 8))
def test_whatever_happens_everything_submitted_has_ended_on_return(
    script: list[tuple[int, bool] | Exception | None], window: int
) -> None:
    """The window holds, nothing is submitted after a failure was seen, bytes are those done."""
    engine, reads = SimulatedEngine(script), simulated_reads(len(script))
    outcome = read_all(engine, reads, window, forever)
    assert engine.running == {}
    assert engine.most <= window
    assert engine.after_failure == 0
    assert engine.submitted == reads[: len(engine.submitted)]
    good = [isinstance(fate, tuple) and fate[1] for fate in script[: len(engine.submitted)]]
    assert outcome.done_bytes == sum(r.size for r, g in zip(reads, good, strict=False) if g)
    assert (outcome.problem is None) == (all(good) and len(engine.submitted) == len(reads))


def test_the_window_is_used_to_the_full() -> None:
    """A read is submitted as soon as another one has ended."""
    engine = SimulatedEngine([(3, True)] * 20)
    assert read_all(engine, simulated_reads(20), 5, forever) == ReadOutcome(210, None)
    assert engine.most == 5


def test_no_reads_are_done_at_once() -> None:
    """A worker that keeps no layer of the request's model has nothing to read."""
    assert read_all(SimulatedEngine([]), [], 4, forever) == ReadOutcome(0, None)


@pytest.mark.parametrize("fate", [None, (0, False), TypeError("no address")], ids=str)
def test_the_first_problem_is_told(fate: tuple[int, bool] | Exception | None) -> None:
    """With the size and the peer; later ones do not hide it."""
    engine = SimulatedEngine([(2, False), fate, (1, True)])
    problem = read_all(engine, simulated_reads(3), 2, forever).problem
    assert problem is not None and "2 bytes" in problem and "peer:1" in problem
    assert len(engine.submitted) == 2
    assert engine.running == {}


def test_a_reason_to_stop_stops_submission_and_is_told() -> None:
    """Cancel and deadline: what runs is waited for, also where it fails afterwards."""
    engine = SimulatedEngine([(30, True), (30, False), (30, True)])
    looks = iter([None, None, *["the request was aborted"] * 100])
    outcome = read_all(engine, simulated_reads(3), 2, lambda: next(looks))
    assert outcome == ReadOutcome(1, "the request was aborted")
    assert len(engine.submitted) == 2
    assert engine.running == {}


# With the real Transfer Engine -----------------------------------------------------------------


def once_after(count: int, act: Callable[[], None], local: Local) -> Callable[[], None]:
    """A ``stop`` that gives no reason, and acts once when ``count`` chunks have arrived."""
    done: list[bool] = []

    def look() -> None:
        if not done and local.arrived >= count:
            done.append(True)
            act()

    return look


def assert_nothing_more_is_written(local: Local, again: Callable[[], None]) -> None:
    """Overwrite everything, let ``again`` give late bytes every chance, and look."""
    local.memory.fill_(EMPTY)
    again()
    assert bool((local.memory == EMPTY).all())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One that is left alone."""
    with serving_process(CHUNKS * CHUNK) as server:
        yield server


@pytest.mark.process
def test_all_bytes_arrive(machine: Machine, server: Server) -> None:
    """In a window of 16, each where it belongs."""
    local = local_for(server.session, server.address, CHUNKS)
    assert read_all(machine.decode, local.reads, 16, forever) == ReadOutcome(CHUNKS * CHUNK, None)
    assert bool((local.memory == PATTERN).all())


@pytest.mark.process
@pytest.mark.parametrize("bad", [0, CHUNKS // 2, CHUNKS - 1])
def test_a_bad_address_among_good_ones_ends_all_of_them_first(
    bad: int, machine: Machine, server: Server
) -> None:
    """The trap: elsewhere the failure returns at once, and the others go on writing."""
    local = local_for(server.session, server.address, CHUNKS)
    local.reads[bad] = Read(server.session, 4096, local.memory[bad].data_ptr(), CHUNK)
    outcome = read_all(machine.decode, local.reads, 16, forever)
    assert outcome.problem == f"a read of {CHUNK:,} bytes from {server.session} failed"
    assert local.arrived * CHUNK == outcome.done_bytes
    assert bool((local.memory[bad] == EMPTY).all())

    def another_pull() -> None:
        assert (
            read_all(
                machine.decode, local_for(server.session, server.address, CHUNKS).reads, 16, forever
            ).problem
            is None
        )

    assert_nothing_more_is_written(local, another_pull)


def test_a_peer_that_nobody_is_fails_at_once(machine: Machine) -> None:
    """2.1: not accepted, and nothing is written."""
    memory = torch.full((1, CHUNK), EMPTY, dtype=torch.uint8)
    read = Read("127.0.0.1:1", 4096, memory.data_ptr(), CHUNK)
    outcome = read_all(machine.decode, [read] * 3, 2, forever)
    assert outcome == ReadOutcome(0, f"127.0.0.1:1 did not accept a read of {CHUNK:,} bytes")
    assert bool((memory == EMPTY).all())


@pytest.mark.process
def test_a_peer_that_is_killed_in_mid_read_ends_the_reads(machine: Machine) -> None:
    """2.1: bounded, some bytes there, and none of them later."""
    with serving_process(CHUNKS * CHUNK) as server:
        local = local_for(server.session, server.address, CHUNKS)
        started = time.monotonic()
        outcome = read_all(machine.decode, local.reads, 4, once_after(5, server.kill, local))
        assert time.monotonic() - started < PATIENCE
        assert outcome.problem is not None
        assert 5 * CHUNK <= outcome.done_bytes < CHUNKS * CHUNK
        assert_nothing_more_is_written(local, lambda: None)
        again = read_all(machine.decode, local.reads, 4, forever)
        assert again.problem is not None and again.done_bytes == 0


@pytest.mark.process
@pytest.mark.parametrize("window", [4, 16])
def test_a_peer_that_stands_still_ends_the_reads_in_time_and_cannot_write_later(
    window: int,
) -> None:
    """2.1: SIGSTOP in mid-read, timeouts of 2 s; then SIGCONT, and its late bytes go nowhere."""
    with (
        serving_process(CHUNKS * CHUNK) as server,
        reading_process(server.session, server.address, CHUNKS, window) as reader,
    ):
        assert reader.says() == "reading"
        server.stop()
        started = time.monotonic()
        reader.go_on()
        outcome = reader.says()
        assert outcome["problem"] is not None and outcome["done"] < CHUNKS * CHUNK
        # Reads queue on four lanes; each of a lane's reads has its own timeout.
        assert time.monotonic() - started < (window // 4 + 1) * 2 * 2.0 + 15.0
        server.go_on()
        reader.go_on()
        assert reader.says() == {"fresh read": None, "late bytes": 0}
