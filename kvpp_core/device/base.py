"""The device protocol: two streams, and events between them.

A stream executes what is submitted to it in order. An event marks a point in a stream. The
pipeline uses two streams: ``compute``, on which the model runs, and ``transfer``, on which layers
are broadcast. `CpuStream` and `AcceleratorStream` implement it; the ordering tests run
against a simulated device that delays both streams, and on a simulated NPU.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Protocol

__all__ = ["Device", "Event", "Fence", "Stream", "Work", "await_fence"]

# A host operation that must end before a layer may be broadcast or read: a load from a pool.
Fence = Future[Any]


def await_fence(fence: Fence, timeout: float) -> None:
    """Block until ``fence`` is done, cancelled too, or ``timeout`` seconds are over.

    `concurrent.futures.wait` does not see a cancellation that no executor has confirmed.
    """
    with suppress(TimeoutError, CancelledError):
        fence.exception(timeout)


class Work(Protocol):
    """A collective under way: torch.distributed's Work, as far as it is used here."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def wait(self, timeout: Any = ...) -> Any:
        """Block until it has ended; raise what it failed with."""
        ...


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether the stream has passed the point. Never blocks."""
        ...

    def wait(self, timeout: float) -> None:
        """Block the host until the stream has passed the point.

        Raises:
            TransferTimeout: it had not after ``timeout`` seconds.
            Exception: what an earlier operation of the stream failed with.
        """
        ...


class Stream(Protocol):
    """Operations in order. ``what`` names an operation in the message of a timeout."""

    def run(self, op: Callable[[], None], what: str) -> None:
        """Execute ``op`` (tensor operations) after everything submitted before."""
        ...

    def collective(self, launch: Callable[[], Work], what: str) -> None:
        """Start a collective after everything submitted before; what follows waits for its end."""
        ...

    def wait(self, event: Event, what: str) -> None:
        """Let everything submitted later wait for an event of another stream."""
        ...

    def wait_fence(self, fence: Fence, timeout: float, what: str) -> None:
        """Let everything submitted later wait until ``fence`` is done, or ``timeout`` s are over.

        Never raises: the fence itself holds the outcome of the load.
        """
        ...

    def record(self) -> Event:
        """An event that marks the end of everything submitted so far."""
        ...


class Device(Protocol):
    """The two streams of a worker."""

    @property
    def compute(self) -> Stream:
        """The stream the model runs on, at the time of the call."""
        ...

    @property
    def transfer(self) -> Stream:
        """The stream that broadcasts run on."""
        ...
