"""The NPU of torch-npu over a simulated CANN, under the controls of `SimulatedDevice`.

Streams and events are those of `AcceleratorDevice`, torch and torch-npu; what runs them is the
library of tests/ascend_sim, one host thread a stream. Besides the two streams HCCL has its own,
which order themselves by events after the transfer stream.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch

from kvpp_core.device.accelerator import AcceleratorDevice
from kvpp_core.device.base import Event, Fence, Stream, Work
from tests.core.simulated_device import SETTLE_BOUND, Breaks, StreamName

__all__ = ["NpuGate", "SimulatedNpu", "npu_is_there"]

OTHERS_FIRST, THIS_FIRST, ANY = 1, 2, 0  # as in tests/ascend_sim/cann/streams.hpp


def npu_is_there() -> bool:
    """Whether torch has an NPU, as in the environment of `make test-ascend-sim`."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "npu"


class SimulatedNpu:
    """An AcceleratorDevice whose two streams can be held, starved, and rid of single orderings."""

    def __init__(self, timeout: float, **breaks: Unpack[Breaks]) -> None:
        self.cann = ctypes.CDLL("libascendcl.so")
        self.cann.sim_hold.restype = ctypes.c_uint64
        self.fence_reached = threading.Event()
        self.gates: list[NpuGate] = []
        self._device = AcceleratorDevice("npu", timeout)
        self._breaks = breaks
        starved = breaks.get("starved")
        if starved is not None:
            self._prefer(OTHERS_FIRST if starved == "compute" else THIS_FIRST)

    @property
    def compute(self) -> Stream:
        """The current stream."""
        ignore = self._breaks.get("break_wait_transfer", False)
        return _Controlled(self, self._device.compute, "compute", ignore_events=ignore)

    @property
    def transfer(self) -> Stream:
        """The stream of transfers."""
        ignore = self._breaks.get("break_wait_compute", False)
        return _Controlled(self, self._device.transfer, "transfer", ignore_events=ignore)

    def hold(self, stream: StreamName, what: str) -> NpuGate:
        """Hold back operations of ``stream`` whose ``what`` contains ``what`` until opened."""
        gate = NpuGate(self.cann, stream, what)
        self.gates.append(gate)
        return gate

    def settle(self) -> None:
        """Wait until every stream of the process is empty, or held by a gate or an event."""
        assert self.cann.sim_settle(ctypes.c_double(SETTLE_BOUND)), "the streams do not settle"

    def ignores_fences(self) -> bool:
        """Whether waits for load fences are left out."""
        return self._breaks.get("break_fence", False)

    def close(self) -> None:
        """Let everything go on."""
        for gate in self.gates:
            gate.open()
        self._prefer(ANY)

    def _prefer(self, which: int) -> None:
        """Let the compute stream go first, or all others."""
        self.cann.sim_prefer(_handle(), ctypes.c_int(which))


class NpuGate:
    """Holds back matching operations of one stream; closed when made."""

    def __init__(self, cann: ctypes.CDLL, stream: StreamName, what: str) -> None:
        self._cann = cann
        self._stream = stream
        self._what = what
        self._holding: list[int] = []
        self._is_open = False

    def before(self, stream: StreamName, what: str) -> None:
        """Put the gate on the current stream if it holds the operation that comes next."""
        if not self._is_open and stream == self._stream and self._what in what:
            self._holding.append(self._cann.sim_hold(_handle()))

    def open(self) -> None:
        """Let everything through."""
        self._is_open = True
        for held in self._holding:
            self._cann.sim_open(ctypes.c_uint64(held))


class _Controlled:
    """An AcceleratorStream with gates before its operations, and without chosen orderings."""

    def __init__(
        self, device: SimulatedNpu, stream: Stream, name: StreamName, *, ignore_events: bool
    ) -> None:
        self._device = device
        self._stream = stream
        self._name = name
        self._ignore_events = ignore_events

    def run(self, op: Callable[[], None], what: str) -> None:
        """Enqueue gates, then ``op``."""
        self._gates(what)
        self._stream.run(op, what)

    def collective(self, launch: Callable[[], Work], what: str) -> None:
        """Enqueue gates, then the collective."""
        self._gates(what)
        self._stream.collective(launch, what)

    def wait(self, event: Event, what: str) -> None:
        """Wait for ``event``, if that is not left out."""
        if not self._ignore_events:
            self._stream.wait(event, what)

    def wait_fence(self, fence: Fence, timeout: float, what: str) -> None:
        """Say that the host waits here, and wait, if that is not left out."""
        self._device.fence_reached.set()
        if not self._device.ignores_fences():
            self._stream.wait_fence(fence, timeout, what)

    def record(self) -> Event:
        """The stream's own event."""
        return self._stream.record()

    def _gates(self, what: str) -> None:
        for gate in self._device.gates:
            self._stream.run(partial(gate.before, self._name, what), "a gate")


def _handle() -> ctypes.c_void_p:
    """The current stream, as CANN knows it."""
    handle: int = torch.accelerator.current_stream().native_handle  # type: ignore[attr-defined]
    return ctypes.c_void_p(handle)
