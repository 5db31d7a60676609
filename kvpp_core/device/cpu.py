"""Streams on the CPU.

The forward's thread is the compute stream: an operation has ended when its call returns. The
transfer stream is a queue without a thread of its own. Every caller advances it as far as it goes
without blocking: the forward's thread when it submits, the thread that completes a load fence, and,
blocking, a thread that waits for one of its events. Bytes move in the process group's threads. A
thread in between would cost up to 8 ms per hand-over under the GIL; a broadcast takes 0.13 ms.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from kvpp_core.device.base import Event, Fence, Work, await_fence
from kvpp_core.errors import TransferFailed, TransferTimeout

__all__ = ["CpuDevice", "CpuStream", "HostStream"]


class _Pending(Protocol):
    """An operation that has been started and may not have ended."""

    def done(self) -> bool: ...

    def wait(self, timeout: float) -> None: ...


@dataclass(frozen=True, slots=True)
class _Operation:
    start: Callable[[], _Pending | None]
    what: str


class CpuDevice:
    """The forward's thread and one queue of transfers."""

    def __init__(self, timeout: float) -> None:
        self.compute = HostStream(timeout)
        self.transfer = CpuStream()


class HostStream:
    """The calling thread as a stream: every operation ends before the call returns."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout  # seconds, for each wait

    def run(self, op: Callable[[], None], what: str) -> None:
        """Execute ``op`` now."""
        op()

    def collective(self, launch: Callable[[], Work], what: str) -> None:
        """Run the collective to its end."""
        _WorkPending(launch(), what).wait(self._timeout)

    def wait(self, event: Event, what: str) -> None:
        """Block until the event is done."""
        event.wait(self._timeout)

    def wait_fence(self, fence: Fence, timeout: float, what: str) -> None:
        """Block until the fence is done or the time is over."""
        await_fence(fence, timeout)

    def record(self) -> Event:
        """An event that is done: nothing is ever outstanding."""
        return _DONE


class _Done:
    def done(self) -> bool:
        return True

    def wait(self, timeout: float) -> None:
        return None


_DONE = _Done()


class CpuStream:
    """A queue of operations that its callers advance. Thread-safe.

    After an operation fails the stream is broken: the queue is dropped, and every later call raises
    the same error. No caller blocks while it holds the lock: the thread that completes a load fence
    takes it, and a forward that waits for that thread's next load must not block it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._queue: deque[_Operation] = deque()
        self._head: _Pending | None = None  # the started operation at the front of the queue
        self._submitted = 0
        self._completed = 0
        self._starting = False  # an operation is being started, by the thread that has the lock
        self._error: BaseException | None = None

    def run(self, op: Callable[[], None], what: str) -> None:
        """Execute ``op`` as soon as everything before it has ended."""
        self._submit(lambda: op(), what)

    def collective(self, launch: Callable[[], Work], what: str) -> None:
        """Start the collective as soon as everything before it has ended."""
        self._submit(lambda: _WorkPending(launch(), what), what)

    def wait(self, event: Event, what: str) -> None:
        """Hold the queue until ``event`` is done."""
        self._submit(lambda: event, what)

    def wait_fence(self, fence: Fence, timeout: float, what: str) -> None:
        """Hold the queue until ``fence`` is done or ``timeout`` seconds are over."""
        pending = _FencePending(fence, time.monotonic() + timeout)
        self._submit(lambda: pending, what)
        fence.add_done_callback(self._on_fence)

    def record(self) -> Event:
        """An event at the present end of the queue."""
        with self._lock:
            return _Mark(self, self._submitted)

    def _submit(self, start: Callable[[], _Pending | None], what: str) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            self._queue.append(_Operation(start, what))
            self._submitted += 1
            self._advance(self._submitted)

    def _on_fence(self, fence: Future[object]) -> None:
        """Advance the queue in the thread that completes a fence, without the forward's.

        The queue keeps an error and raises it to its waiters. An operation that itself completes a
        fence comes here, too; the _advance() that runs it continues.
        """
        with self._lock:
            if self._error is None and not self._starting:
                self._advance(self._submitted)

    def passed(self, position: int) -> bool:
        """Whether everything up to ``position`` has ended. Advances the queue without blocking."""
        with self._lock:
            return self._advance(position)

    def wait_for(self, position: int, timeout: float) -> None:
        """Advance the queue to ``position``, blocking for at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                if self._advance(position):
                    return
                assert self._head is not None
                head, what = self._head, self._queue[0].what
            self._block_on(head, what, deadline)

    def _advance(self, position: int) -> bool:
        """Execute queued operations until ``position``, as far as it goes without blocking."""
        if self._error is not None:
            raise self._error
        try:
            while self._completed < position:
                if self._head is None:
                    self._head = self._start(self._queue[0])
                if not self._head.done():
                    return False
                self._head.wait(0)  # ended: raises what it failed with
                self._queue.popleft()
                self._head = None
                self._completed += 1
        except BaseException as error:
            self._break(error)
            raise
        return True

    def _start(self, operation: _Operation) -> _Pending:
        self._starting = True
        try:
            # The forward made these tensors in inference mode; a thread that completes a fence
            # is outside of it and could not write them.
            with torch.inference_mode():
                return operation.start() or _DONE
        finally:
            self._starting = False

    def _block_on(self, head: _Pending, what: str, deadline: float) -> None:
        """Wait for the operation at the front until ``deadline``. Called without the lock."""
        try:
            head.wait(max(deadline - time.monotonic(), 0))
            if not head.done() and time.monotonic() >= deadline:
                raise TransferTimeout(
                    f"{what} had not ended when its wait ran out; "
                    "is a rank of the group stuck or gone?"
                )
        except BaseException as error:
            with self._lock:
                self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._queue.clear()
        self._head = None


class _Mark:
    """A position in a CpuStream."""

    def __init__(self, stream: CpuStream, position: int) -> None:
        self._stream = stream
        self._position = position

    def done(self) -> bool:
        return self._stream.passed(self._position)

    def wait(self, timeout: float) -> None:
        self._stream.wait_for(self._position, timeout)


class _WorkPending:
    """torch.distributed's Work as a pending operation; tells timeouts from failures."""

    def __init__(self, work: Work, what: str) -> None:
        self._work = work
        self._what = what

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: float) -> None:
        try:
            self._work.wait(timedelta(seconds=max(timeout, 0.001)))
        except RuntimeError as error:
            if not self._work.is_completed():
                raise TransferTimeout(
                    f"{self._what} did not end within {timeout:.1f} s; "
                    "is a rank of the group stuck or gone?"
                ) from error
            raise TransferFailed(
                f"{self._what} failed; is a rank of the group gone? {error}"
            ) from error


class _FencePending:
    """A load fence as a pending operation; over when it is done or its time has run out."""

    def __init__(self, fence: Fence, deadline: float) -> None:
        self._fence = fence
        self._deadline = deadline

    def done(self) -> bool:
        return self._fence.done() or time.monotonic() >= self._deadline

    def wait(self, timeout: float) -> None:
        await_fence(self._fence, min(timeout, max(self._deadline - time.monotonic(), 0)))
