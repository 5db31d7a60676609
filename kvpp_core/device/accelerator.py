"""Streams on CUDA and Ascend NPUs, through torch's device-neutral Stream and Event.

No call blocks the host but a wait for a load fence: the load is a host operation, and collectives
of one device must be launched in one order (NCCL and HCCL deadlock otherwise), so the launch waits.
Tests run it on torch-npu over a simulated CANN (docs/ascend.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from kvpp_core.device.base import Event, Fence, Stream, Work, await_fence
from kvpp_core.errors import KvppError, TransferTimeout

__all__ = ["AcceleratorDevice", "AcceleratorStream"]


class AcceleratorDevice:
    """The current stream of the device and one high-priority stream for transfers."""

    def __init__(self, device_type: str, timeout: float) -> None:
        self._device_type = device_type
        self._timeout = timeout  # seconds, for a host wait
        self.transfer: Stream = AcceleratorStream(
            torch.Stream(device=device_type, priority=-1), timeout
        )

    @property
    def compute(self) -> Stream:
        """The stream the model runs on now: CUDA graphs and warm-up switch it."""
        return AcceleratorStream(torch.accelerator.current_stream(), self._timeout)


class AcceleratorStream:
    """A torch.Stream under the protocol of `kvpp_core.device.base`."""

    def __init__(self, stream: torch.Stream, timeout: float) -> None:
        self._stream = stream
        self._timeout = timeout

    def run(self, op: Callable[[], None], what: str) -> None:
        """Enqueue ``op``'s kernels."""
        with self._stream, _named(what):
            op()

    def collective(self, launch: Callable[[], Work], what: str) -> None:
        """Enqueue the collective; its Work's wait() orders the stream, not the host."""
        with self._stream, _named(what):
            launch().wait()

    def wait(self, event: Event, what: str) -> None:
        """Let the stream wait for an event of another stream of the same device."""
        if not isinstance(event, AcceleratorEvent):
            raise KvppError(f"{what}: an accelerator stream cannot wait for {event!r}")
        self._stream.wait_event(event.event)

    def wait_fence(self, fence: Fence, timeout: float, what: str) -> None:
        """Block the host until the load is done or the time is over."""
        with _named(what):
            await_fence(fence, timeout)

    def record(self) -> Event:
        """Record an event at the end of the stream."""
        return AcceleratorEvent(self._stream.record_event())


def _named(what: str) -> AbstractContextManager[object]:
    """A range of the profile that is being taken; entering one costs microseconds even without."""
    if profiler._is_profiler_enabled:
        return record_function(f"KVPP: {what}")
    return nullcontext()


class AcceleratorEvent:
    """A torch.Event under the protocol."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def done(self) -> bool:
        """Whether the device has passed it."""
        return bool(self.event.query())

    def wait(self, timeout: float) -> None:
        """Poll until the device has passed it: torch has no bounded synchronize."""
        deadline = time.monotonic() + timeout
        while not self.event.query():
            if time.monotonic() > deadline:
                raise TransferTimeout(f"a device event was not reached within {timeout:.1f} s")
            time.sleep(0.0005)
