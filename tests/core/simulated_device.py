"""A device with two asynchronous streams, simulated because no accelerator is at hand.

Each stream is a thread that executes its operations in order, so that, unlike on the CPU, what is
submitted to ``compute`` runs later too. Tests delay chosen operations with gates, starve one
stream of the other, and take single orderings away, to see that the bytes then are wrong. Nothing
here sleeps: `settle` waits until both streams have gone as far as they can.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import torch

from kvpp_core.device.base import Event, Fence, Work
from kvpp_core.errors import TransferTimeout

__all__ = ["Breaks", "Gate", "SimulatedDevice", "SimulatedStream", "StreamName"]

SETTLE_BOUND = 30.0  # seconds

StreamName = Literal["compute", "transfer"]


class Breaks(TypedDict, total=False):
    """What a device does wrong, or as late as it can.

    ``break_wait_compute``: the transfer stream does not wait for events of the compute stream.
    ``break_wait_transfer``: the compute stream does not wait for events of the transfer stream.
    ``break_fence``: the transfer stream does not wait for load fences.
    ``starved``: that stream starts an operation only when the other one can go no further.
    """

    break_wait_compute: bool
    break_wait_transfer: bool
    break_fence: bool
    starved: StreamName | None


@dataclass(frozen=True, slots=True)
class _Operation:
    what: str
    execute: Callable[[], None]
    ready: Callable[[], bool]  # asked under the device's lock
    deadline: float | None = None  # time.monotonic() after which ``ready`` may change by itself


class SimulatedDevice:
    """Two streams under one lock."""

    def __init__(self, **breaks: Unpack[Breaks]) -> None:
        self.state = threading.Condition()
        self.gates: list[Gate] = []
        self.compute = SimulatedStream(
            self, "compute", ignore_events=breaks.get("break_wait_transfer", False)
        )
        self.transfer = SimulatedStream(
            self,
            "transfer",
            ignore_events=breaks.get("break_wait_compute", False),
            ignore_fences=breaks.get("break_fence", False),
        )
        starved = breaks.get("starved")
        if starved is not None:
            other = self.transfer if starved == "compute" else self.compute
            getattr(self, starved).only_when_quiet(other)

    def hold(self, stream: StreamName, what: str) -> Gate:
        """Hold back operations of ``stream`` whose ``what`` contains ``what`` until opened."""
        gate = Gate(self, stream, what)
        with self.state:
            self.gates.append(gate)
        return gate

    def settle(self) -> None:
        """Wait until both streams are empty, or held by a gate, an event or a fence.

        The state is stable: only the host, another thread or a deadline can move it.
        """
        with self.state:
            quiet = self.state.wait_for(
                lambda: self.compute.quiet() and self.transfer.quiet(), SETTLE_BOUND
            )
        assert quiet, f"not settled: {self.compute.describe()}; {self.transfer.describe()}"

    def close(self) -> None:
        """Stop both threads; what is queued is dropped."""
        for stream in (self.compute, self.transfer):
            stream.close()


class Gate:
    """Holds back matching operations of one stream; closed when made."""

    def __init__(self, device: SimulatedDevice, stream: StreamName, what: str) -> None:
        self._device = device
        self._stream = stream
        self._what = what
        self.is_open = False

    def holds(self, stream: StreamName, what: str) -> bool:
        """Whether an operation may not start."""
        return not self.is_open and stream == self._stream and self._what in what

    def open(self) -> None:
        """Let everything through."""
        with self._device.state:
            self.is_open = True
            self._device.state.notify_all()


class SimulatedStream:
    """A thread that executes operations in order. An error is kept, and raised to who waits."""

    def __init__(
        self,
        device: SimulatedDevice,
        name: StreamName,
        *,
        ignore_events: bool = False,
        ignore_fences: bool = False,
    ) -> None:
        self._device = device
        self._state = device.state
        self._name = name
        self._ignore_events = ignore_events
        self._ignore_fences = ignore_fences
        self._other: SimulatedStream | None = None
        self._queue: deque[_Operation] = deque()
        self._running: _Operation | None = None
        self._submitted = 0
        self._completed = 0
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"sim-{name}", daemon=True)
        self._thread.start()

    def run(self, op: Callable[[], None], what: str) -> None:
        """Enqueue ``op``."""
        self._submit(_Operation(what, op, lambda: True))

    def collective(self, launch: Callable[[], Work], what: str) -> None:
        """Enqueue a collective; the thread waits for its end."""

        def execute() -> None:
            launch().wait()

        self._submit(_Operation(what, execute, lambda: True))

    def wait(self, event: Event, what: str) -> None:
        """Hold the stream until ``event``; fail with it if its stream fails."""
        if self._ignore_events:
            return
        assert isinstance(event, SimulatedEvent)
        self._submit(_Operation(what, lambda: event.wait(0.0), event.over))

    def wait_fence(self, fence: Fence, timeout: float, what: str) -> None:
        """Hold the stream until ``fence`` is done or ``timeout`` seconds are over."""
        if self._ignore_fences:
            return
        deadline = time.monotonic() + timeout
        self._submit(
            _Operation(
                what,
                lambda: None,
                lambda: fence.done() or time.monotonic() >= deadline,
                deadline,
            )
        )
        fence.add_done_callback(lambda _: self._wake())

    def record(self) -> SimulatedEvent:
        """An event at the present end of the queue."""
        with self._state:
            return SimulatedEvent(self, self._submitted)

    def only_when_quiet(self, other: SimulatedStream) -> None:
        """From now on start an operation only when ``other`` can go no further."""
        with self._state:
            self._other = other

    def over(self, position: int) -> bool:
        """Whether the stream has passed ``position``, or failed."""
        return self._completed >= position or self._error is not None

    def wait_for(self, position: int, timeout: float) -> None:
        """Block the host until the stream has passed ``position``."""
        with self._state:
            in_time = self._state.wait_for(lambda: self.over(position), timeout)
            if self._completed >= position:
                return
            if self._error is not None:
                raise self._error
            assert not in_time
            raise TransferTimeout(f"{self.describe()} after {timeout} s")

    def quiet(self) -> bool:
        """Whether nothing runs and nothing can start. Asked under the device's lock."""
        return self._running is None and not self._may_start()

    def describe(self) -> str:
        """What the stream is at, for a message."""
        if self._running is not None:
            return f"the {self._name} stream is still at {self._running.what}"
        if self._queue:
            return f"the {self._name} stream is held before {self._queue[0].what}"
        return f"the {self._name} stream is idle"

    def close(self) -> None:
        """End the thread; it is left behind as a daemon if a collective hangs."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join(1.0)

    def _submit(self, operation: _Operation) -> None:
        with self._state:
            if self._error is not None:
                raise self._error
            self._queue.append(operation)
            self._submitted += 1
            self._state.notify_all()

    def _wake(self) -> None:
        with self._state:
            self._state.notify_all()

    def _may_start(self) -> bool:
        """Whether the first operation can start, leaving starvation aside only for the other."""
        if not self._queue or not self._queue[0].ready():
            return False
        if any(gate.holds(self._name, self._queue[0].what) for gate in self._device.gates):
            return False
        return self._other is None or self._other.quiet()

    def _work(self) -> None:
        while (operation := self._next()) is not None:
            try:
                with torch.inference_mode():  # as a device, which knows of no such mode
                    operation.execute()
            except BaseException as error:  # noqa: BLE001 - kept, and raised to who waits
                self._end(error)
            else:
                self._end(None)

    def _next(self) -> _Operation | None:
        """Wait for an operation that can start; None when the stream is closed."""
        with self._state:
            while not self._closed:
                if self._may_start():
                    self._running = self._queue.popleft()
                    return self._running
                deadline = self._queue[0].deadline if self._queue else None
                left = None if deadline is None else max(deadline - time.monotonic(), 0.001)
                self._state.wait(left)
        return None

    def _end(self, error: BaseException | None) -> None:
        with self._state:
            self._running = None
            if error is None:
                self._completed += 1
            else:
                self._error = error
                self._queue.clear()
            self._state.notify_all()


class SimulatedEvent:
    """A position in a SimulatedStream."""

    def __init__(self, stream: SimulatedStream, position: int) -> None:
        self._stream = stream
        self._position = position

    def over(self) -> bool:
        """Whether the stream has passed the point or failed. Asked under the device's lock."""
        return self._stream.over(self._position)

    def done(self) -> bool:
        """Whether the stream has passed the point; raises what it failed with."""
        try:
            self._stream.wait_for(self._position, 0.0)
        except TransferTimeout:
            return False
        return True

    def wait(self, timeout: float) -> None:
        """Block the host until the stream has passed the point."""
        self._stream.wait_for(self._position, timeout)
