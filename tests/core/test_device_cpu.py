"""The CPU's streams: order, fences, errors, bounds, and many threads at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import pytest

from kvpp_core.device import make_device
from kvpp_core.device.base import Fence
from kvpp_core.device.cpu import CpuDevice, CpuStream, HostStream
from kvpp_core.errors import KvppError, TransferTimeout

BOUND = 20.0  # seconds, for waits that are expected to end
SOON = 0.05  # seconds, for waits that are meant to run out


class ScriptedWork:
    """A collective that ends when the test says so."""

    def __init__(self) -> None:
        self._end: Future[None] = Future()

    def finish(self, error: RuntimeError | None = None) -> None:
        """End it."""
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._end.done()

    def wait(self, timeout: Any = None) -> bool:
        """As torch's Work: RuntimeError when the time is over."""
        assert isinstance(timeout, timedelta)
        try:
            self._end.result(timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError("Operation timed out!") from error
        return True


class WatchedFence(Future[None]):
    """A fence that tells when a stream looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def done(self) -> bool:
        """Whether it is done."""
        self.asked.set()
        return super().done()


def _logged(stream: CpuStream, log: list[str], name: str) -> None:
    stream.run(lambda: log.append(name), name)


def test_operations_run_in_order_and_at_once_when_nothing_is_before_them() -> None:
    stream, log = CpuStream(), list[str]()
    for name in "abc":
        _logged(stream, log, name)
        assert log[-1] == name
    assert log == ["a", "b", "c"]
    assert stream.record().done()


def test_what_follows_a_collective_waits_for_its_end() -> None:
    stream, log, work = CpuStream(), list[str](), ScriptedWork()
    stream.collective(lambda: work, "a collective")
    _logged(stream, log, "after")
    event = stream.record()
    assert not event.done()
    assert log == []
    work.finish()
    event.wait(BOUND)
    assert log == ["after"]
    assert event.done()


def test_an_event_marks_what_was_submitted_before_it_only() -> None:
    stream, works = CpuStream(), [ScriptedWork(), ScriptedWork()]
    stream.collective(lambda: works[0], "first")
    first = stream.record()
    stream.collective(lambda: works[1], "second")
    second = stream.record()
    works[0].finish()
    first.wait(BOUND)
    assert first.done()
    assert not second.done()
    works[1].finish()
    second.wait(BOUND)


def test_a_stream_waits_for_an_event_of_another_stream() -> None:
    stream, other, work, log = CpuStream(), CpuStream(), ScriptedWork(), list[str]()
    other.collective(lambda: work, "the other one's collective")
    stream.wait(other.record(), "the other stream")
    _logged(stream, log, "after")
    assert log == []
    work.finish()
    stream.record().wait(BOUND)
    assert log == ["after"]


@pytest.mark.parametrize(
    "complete",
    [
        lambda fence: fence.set_result(None),
        lambda fence: fence.set_exception(ConnectionError("lost")),
        lambda fence: fence.cancel(),
    ],
    ids=["done", "failed", "cancelled"],
)
def test_the_thread_that_completes_a_fence_pushes_the_queue(
    complete: Callable[[Future[None]], None],
) -> None:
    """Nobody else touches the stream: the owner sends a loaded layer while its model computes."""
    stream, log = CpuStream(), list[str]()
    fence: Future[None] = Future()
    stream.wait_fence(fence, BOUND, "a load")
    _logged(stream, log, "after")
    assert log == []
    thread = threading.Thread(target=complete, args=(fence,))
    thread.start()
    thread.join(BOUND)
    assert log == ["after"]


@pytest.mark.parametrize("make", [CpuStream, lambda: HostStream(BOUND)], ids=["cpu", "host"])
def test_a_fence_that_never_ends_holds_the_stream_for_its_time_only(
    make: Callable[[], CpuStream | HostStream],
) -> None:
    """And raises nothing: who needs to know reads the fence."""
    stream = make()
    stream.wait_fence(Future(), SOON, "a load")
    stream.record().wait(BOUND)


@pytest.mark.parametrize("make", [CpuStream, lambda: HostStream(BOUND)], ids=["cpu", "host"])
def test_a_cancelled_fence_holds_nobody(make: Callable[[], CpuStream | HostStream]) -> None:
    """`concurrent.futures.wait` would sit out the whole time."""
    stream, fence, started = make(), Future[None](), time.monotonic()
    fence.cancel()
    stream.wait_fence(fence, 10 * BOUND, "a load")
    stream.record().wait(10 * BOUND)
    assert time.monotonic() - started < BOUND


def test_a_fence_that_is_cancelled_while_somebody_waits_lets_him_go() -> None:
    stream, fence, started = CpuStream(), Future[None](), time.monotonic()
    stream.wait_fence(fence, 10 * BOUND, "a load")
    with ThreadPoolExecutor(1) as threads:
        waiter = threads.submit(stream.record().wait, 10 * BOUND)
        fence.cancel()
        waiter.result(BOUND)
    assert time.monotonic() - started < BOUND


def test_who_completes_a_fence_is_not_held_up_by_who_waits_for_the_next_one() -> None:
    """One loader thread completes the fences of two layers, the first one after its time."""
    stream, late, next_one = CpuStream(), Future[None](), WatchedFence()
    stream.wait_fence(late, 0.0, "the load of layer 0")
    stream.wait_fence(next_one, BOUND, "the load of layer 1")
    next_one.asked.clear()

    def load() -> None:
        late.set_result(None)
        next_one.set_result(None)

    started = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        waiter = threads.submit(stream.record().wait, BOUND)
        assert next_one.asked.wait(BOUND)
        loader = threads.submit(load)
        loader.result(BOUND)
        waiter.result(BOUND)
    assert time.monotonic() - started < BOUND / 2


def test_an_operation_may_complete_a_fence_of_its_own_stream() -> None:
    """It is not started a second time by the push that follows."""
    stream, log, fence = CpuStream(), list[str](), Future[None]()

    def complete() -> None:
        log.append("completing")
        fence.set_result(None)

    stream.wait_fence(fence, 0.0, "a load that is over")
    stream.run(complete, "completing the fence")
    _logged(stream, log, "after")
    stream.record().wait(BOUND)
    assert log == ["completing", "after"]


@pytest.mark.parametrize("place", ["an operation", "a launch", "a collective"])
def test_an_error_is_raised_to_everybody_and_nothing_runs_after_it(place: str) -> None:
    stream, log, work = CpuStream(), list[str](), ScriptedWork()
    hold = ScriptedWork()
    stream.collective(lambda: hold, "held until the events are there")

    def fail() -> Any:
        raise KvppError("broken on purpose")

    if place == "an operation":
        stream.run(fail, place)
    elif place == "a launch":
        stream.collective(fail, place)
    else:
        stream.collective(lambda: work, place)
        work.finish(RuntimeError("broken on purpose"))
    before = stream.record()
    _logged(stream, log, "dropped")
    hold.finish()
    for event in (before, stream.record()):
        for _ in range(2):
            with pytest.raises((KvppError, RuntimeError), match="broken on purpose"):
                event.wait(BOUND)
            with pytest.raises((KvppError, RuntimeError), match="broken on purpose"):
                event.done()
    with pytest.raises((KvppError, RuntimeError), match="broken on purpose"):
        _logged(stream, log, "refused")
    assert log == []


def test_a_fence_that_ends_on_a_broken_stream_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """concurrent.futures logs what a callback raises, at a level that frightens operators."""
    stream, fence = CpuStream(), Future[None]()
    stream.wait_fence(fence, BOUND, "a load")
    with pytest.raises(TransferTimeout):
        stream.record().wait(SOON)
    fence.set_result(None)
    assert caplog.records == []


def test_a_timeout_names_what_was_waited_for_and_breaks_the_stream() -> None:
    stream, work = CpuStream(), ScriptedWork()
    stream.collective(lambda: work, "the broadcast of layer 3")
    stream.run(lambda: None, "something later")
    for _ in range(2):
        with pytest.raises(TransferTimeout, match="the broadcast of layer 3"):
            stream.record().wait(SOON)
    work.finish()
    with pytest.raises(TransferTimeout, match="the broadcast of layer 3"):
        stream.record().wait(BOUND)


def test_a_timeout_names_the_load_or_the_stream_that_holds_the_queue() -> None:
    held = CpuStream()
    held.wait_fence(Future(), BOUND, "the load of layer 5")
    stream = CpuStream()
    stream.wait(held.record(), "computation before layer 5")
    with pytest.raises(TransferTimeout, match="layer 5"):
        stream.record().wait(SOON)


def test_a_wait_without_time_still_takes_what_is_done() -> None:
    stream, work = CpuStream(), ScriptedWork()
    work.finish()
    stream.collective(lambda: work, "a collective")
    stream.record().wait(0.0)


def test_the_host_stream_has_finished_whatever_it_was_given() -> None:
    stream, log, work = HostStream(SOON), list[str](), ScriptedWork()
    stream.run(lambda: log.append("a"), "a")
    assert log == ["a"]
    assert stream.record().done()
    stream.record().wait(0.0)
    with pytest.raises(TransferTimeout, match="a collective nobody joins"):
        stream.collective(lambda: work, "a collective nobody joins")
    work.finish()
    stream.collective(lambda: work, "a collective")
    with pytest.raises(TransferTimeout, match="the other one"):
        other = CpuStream()
        other.collective(ScriptedWork, "the other one")
        stream.wait(other.record(), "its end")


def test_cpu_is_the_cpu_device() -> None:
    assert isinstance(make_device("cpu", BOUND), CpuDevice)


def _identity(work: ScriptedWork) -> ScriptedWork:
    return work


class Hammer:
    """Threads that submit, wait, and complete fences and collectives, all at random."""

    def __init__(self, seed: int, threads: int, rounds: int) -> None:
        self._seed = seed
        self._threads = threads
        self._rounds = rounds
        self._stream = CpuStream()
        self._inside = threading.Lock()  # held by the operation that runs
        self.overlaps = 0
        self.log: list[tuple[int, int]] = []  # (thread, its operation), as executed
        self.late: list[tuple[int, int]] = []  # waited for, and not executed

    def run(self) -> None:
        """Let all threads go; re-raise what one of them raised."""
        with ThreadPoolExecutor(self._threads + 1) as pool:
            self._completer = pool
            for done in [pool.submit(self._hammer, thread) for thread in range(self._threads)]:
                done.result(3 * BOUND)
        self._stream.record().wait(BOUND)

    def expected(self) -> set[tuple[int, int]]:
        """Every operation of every thread."""
        return {(t, i) for t in range(self._threads) for i in range(self._rounds)}

    def _hammer(self, thread: int) -> None:
        draw = Random(f"{self._seed}/{thread}")
        for i in range(self._rounds):
            later: list[Callable[[], None]] = []
            kind = draw.random()
            if kind < 0.2:
                fence: Fence = Future()
                self._stream.wait_fence(fence, BOUND, f"fence {thread}/{i}")
                later.append(partial(fence.set_result, None))
            elif kind < 0.4:
                work = ScriptedWork()
                self._stream.collective(partial(_identity, work), f"work {thread}/{i}")
                later.append(work.finish)
            self._stream.run(partial(self._operation, thread, i), f"{thread}/{i}")
            event = self._stream.record()
            for complete in later:
                if draw.random() < 0.5:
                    complete()
                else:
                    self._completer.submit(complete)
            if draw.random() < 0.3:
                event.wait(BOUND)
                if (thread, i) not in self.log:
                    self.late.append((thread, i))
            elif draw.random() < 0.3:
                event.done()

    def _operation(self, thread: int, i: int) -> None:
        if not self._inside.acquire(blocking=False):
            self.overlaps += 1
            return
        self.log.append((thread, i))
        self._inside.release()


@pytest.mark.parametrize("seed", range(6))
def test_many_threads_get_every_operation_once_in_their_order_and_never_two_at_a_time(
    seed: int,
) -> None:
    hammer = Hammer(seed, threads=4, rounds=60)
    hammer.run()
    assert hammer.overlaps == 0
    assert hammer.late == []
    assert len(hammer.log) == len(hammer.expected())
    assert set(hammer.log) == hammer.expected()
    for thread in range(4):
        own = [i for t, i in hammer.log if t == thread]
        assert own == sorted(own)
