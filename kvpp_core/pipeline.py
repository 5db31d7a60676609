"""The per-step state machine: begin, acquire each layer, end; abort and close.

Section 2.3 of the specification. A step with history starts the broadcast of the first target
layer; each layer waits for its own broadcast before its first cache access and then starts the
next one, so that one transfer overlaps one layer of computation:

    begin ──▶ start(0)
    acquire(0) ──▶ wait(0), start(1)      slot 0 is in use, slot 1 is being filled
    acquire(1) ──▶ wait(1), start(2)      slot 0 is free again: layer 0 has been computed
    ...
    end

Ordering (S10): a transfer waits for an event recorded on the compute stream when it is started.
The event covers the owner's earlier writes to the layer and the last use of the scratch slot that
is about to be refilled. The compute stream waits for the transfer's end before it reads.
A layer with a load fence is broadcast after its load has ended on the owner (S4); the owner's
load status travels ahead on the control group, so that all ranks fail alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from enum import Enum, IntEnum, auto

import torch

from kvpp_core.device.base import Device, Event, Fence
from kvpp_core.device.cpu import CpuStream
from kvpp_core.errors import AcquireOrderError, LoadFailed, PipelineClosed, PlanError
from kvpp_core.group import KvppGroup
from kvpp_core.history import History
from kvpp_core.layout import RankLayout
from kvpp_core.policy import BroadcastPolicy, CostModel, Mode, choose_mode, mode_bytes
from kvpp_core.stats import PipelineStats
from kvpp_core.trace import Lane, SpanRecorder
from kvpp_core.transfer import BundleTransfer

__all__ = ["Pipeline", "PipelineSettings"]

POISON = 0xFF  # a quiet NaN in every float format, -1 in every integer format


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """How a pipeline broadcasts, and how long it waits. The same on every rank of a group."""

    policy: BroadcastPolicy
    cost: CostModel
    transfer_timeout: float  # seconds, for each wait for a broadcast
    load_timeout: float  # seconds that a load may take once its layer is to be broadcast
    poison_scratch: bool = False  # fill scratch with 0xFF at the start of each step


class _State(Enum):
    IDLE = auto()
    STEP = auto()
    BROKEN = auto()
    CLOSED = auto()


class _LoadStatus(IntEnum):
    """The outcome of a load on the owner, as broadcast."""

    OK = 0
    FAILED = 1
    TIMED_OUT = 2


@dataclass(slots=True)
class _InFlight:
    """The transfer that has been started and not yet been acquired."""

    ordinal: int
    done: Event
    status: torch.Tensor | None  # the owner's load status, on the host
    status_known: Event | None


@dataclass(frozen=True, slots=True)
class _Step:
    history: History
    index: torch.Tensor  # active block ids on the buffer's device
    fences: Mapping[int, Fence]
    on_load_failed: Callable[[int, bool], None] | None
    guarded: bool  # some layer is loaded in this step: every transfer carries a load status


class Pipeline:
    """Keeps one rank's target layers readable, layer by layer, step by step.

    All methods are called from the thread that runs the model; fences may be completed from any
    thread. ``buffer`` is the rank's KV memory as one-dimensional bytes laid out by ``layout``,
    ``staging`` memory of the same device for packed messages. ``spans`` records when what runs in
    steps with history; its begin_step() is the caller's.
    """

    def __init__(
        self,
        layout: RankLayout,
        buffer: torch.Tensor,
        staging: torch.Tensor,
        group: KvppGroup,
        device: Device,
        settings: PipelineSettings,
        spans: SpanRecorder | None = None,
    ) -> None:
        self._layout = layout
        self._buffer = buffer
        self._staging_bytes = staging.numel()
        self._group = group
        self._device = device
        self._settings = settings
        self._spans = spans or SpanRecorder()
        self._transfer = BundleTransfer(
            layout, buffer, staging, group, device.transfer, self._spans
        )
        self._control = CpuStream()
        self._ordinals = {
            component.name: ordinal
            for ordinal, bundle in enumerate(layout.placement.bundles)
            for component in bundle.components
        }
        self._state = _State.IDLE
        self._step: _Step | None = None
        self._current = -1  # ordinal of the layer acquired last in this step
        self._computing_since = 0  # ns: the layer acquired last may be computed
        self._in_flight: _InFlight | None = None
        self.stats = PipelineStats()

    @property
    def layout(self) -> RankLayout:
        """Where every byte of the buffer lies."""
        return self._layout

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._state is _State.STEP

    def set_policy(self, policy: BroadcastPolicy) -> None:
        """Change the broadcast policy between two steps; all ranks must do so alike (S8).

        Raises:
            PipelineClosed: inside a step.
        """
        if self._state is not _State.IDLE:
            raise PipelineClosed(f"the policy of a pipeline that is {self._state.name} is fixed")
        self._settings = replace(self._settings, policy=policy)

    def begin(
        self,
        active_blocks: Sequence[int],
        fences: Mapping[int, Fence] | None = None,
        *,
        guarded: bool = False,
        on_load_failed: Callable[[int, bool], None] | None = None,
    ) -> None:
        """Start a step. Without active blocks nothing is broadcast and nothing is checked.

        ``active_blocks`` are sorted, unique ids of blocks that hold history of this step's
        requests. ``fences`` maps transformer layer indices to loads that must end before the
        layer may be broadcast; ``guarded`` says that some rank of the group has fences, and must
        be the same on every rank (S8). ``on_load_failed(layer, late)`` is called on every rank
        for a layer whose owner could not load it, or not in time (``late``), and the step goes on
        with what the owner had; without it `acquire` raises.

        Raises:
            PipelineClosed: after close(), inside a step, or after a failed abort().
            PlanError: fences without ``guarded``, or a block id outside the pool.
        """
        if self._state is not _State.IDLE:
            raise PipelineClosed(
                f"a step cannot begin: the KVPP pipeline is {self._state.name.lower()}"
            )
        if fences and not guarded:
            raise PlanError("load fences in a step that is not announced as guarded to the group")
        history = History.of(active_blocks, self._layout.num_blocks)
        self.stats.steps += 1
        self._state = _State.STEP
        self._current = -1
        if self._settings.poison_scratch:
            self._device.compute.run(self._poison, "poisoning the scratch slots")
        if not history.blocks or not self._layout.placement.bundles:
            return
        place = self._buffer.device
        # From page-locked memory: a copy from other memory holds the host until its turn.
        index = torch.tensor(history.blocks, pin_memory=place.type != "cpu").to(
            place, non_blocking=True
        )
        self._step = _Step(history, index, fences or {}, on_load_failed, guarded)
        self.stats.steps_with_history += 1
        self._launch(0)

    def acquire(self, component: str) -> None:
        """Make a target layer readable and writable; start the next layer's broadcast.

        Call it before the first cache access of the component. Components of one bundle may come
        in any order; only the first one waits.

        Raises:
            AcquireOrderError: the layer is not a target layer, or not the next one.
            LoadFailed: the owner could not load the layer (on every rank of the group), and begin()
                got no ``on_load_failed``.
            PipelineClosed: after close() or a failed abort(): the layer may be unreadable.
            TransferTimeout: the broadcast did not end in time.
        """
        step = self._step
        if step is None:
            if self._state in (_State.BROKEN, _State.CLOSED):
                raise PipelineClosed(
                    f"{component} was touched, but the KVPP pipeline is {self._state.name.lower()}"
                )
            return
        ordinal = self._ordinals.get(component)
        if ordinal is None:
            raise AcquireOrderError(f"{component!r} is no cache of a target layer of this rank")
        if ordinal == self._current:
            return
        if ordinal != self._current + 1:
            raise AcquireOrderError(
                f"layer {self._layer(ordinal)} ({component}) was touched after "
                f"{self._after(self._current)}; expected {self._after(self._current + 1)}"
            )
        began = time.monotonic_ns()
        self._record_compute(began)
        self._wait_for(ordinal)
        self._count_wait(ordinal, began, time.monotonic_ns())
        self._current = ordinal
        if ordinal + 1 < len(self._layout.placement.bundles):
            self._launch(ordinal + 1)
        self._computing_since = time.monotonic_ns()

    def end(self) -> None:
        """Finish a step whose forward returned.

        Raises:
            AcquireOrderError: a target layer was never touched; what it would have read is in
                scratch memory that the next step overwrites. The pipeline is idle again.
        """
        if self._state is not _State.STEP:
            raise PipelineClosed(f"end() outside a step: the pipeline is {self._state.name}")
        last = len(self._layout.placement.bundles) - 1
        if self._step is not None and self._current != last:
            missing = self._current + 1
            self.abort()
            raise AcquireOrderError(
                f"the forward ended without touching the cache of {self._after(missing)}; "
                f"{last - self._current} of {last + 1} target layers were left out"
            )
        self._record_compute(time.monotonic_ns())
        self._finish_step()

    def abort(self) -> None:
        """Abandon a step at any point: wait until nothing is in flight.

        Afterwards no transfer reads or writes the buffer, and a new step may begin.

        Raises:
            TransferTimeout: the transfer in flight did not end; the pipeline is broken and
                refuses further steps.
        """
        if self._state is not _State.STEP:
            return
        self.stats.aborted_steps += 1
        self._drain()
        self._finish_step()

    def close(self) -> None:
        """Wait until nothing is in flight; refuse further steps. May be called twice.

        Raises:
            TransferTimeout: the transfer in flight did not end.
        """
        if self._state is _State.CLOSED:
            return
        try:
            self._drain()
        finally:
            self._finish_step()
            self._state = _State.CLOSED

    def _finish_step(self) -> None:
        self._step = None
        self._in_flight = None
        self._state = _State.IDLE

    def _drain(self) -> None:
        """Wait for every transfer: one that was acquired may not have ended on the device."""
        in_flight = self._in_flight
        timeout = self._settings.transfer_timeout + self._settings.load_timeout
        try:
            if in_flight is not None and in_flight.status_known is not None:
                in_flight.status_known.wait(timeout)  # first, as in acquire() on other ranks
            self._device.transfer.record().wait(timeout)
        except BaseException:
            self._step = None
            self._state = _State.BROKEN
            raise

    def _launch(self, ordinal: int) -> None:
        """`_start`, in the forward's time: on the CPU an owner that need not wait packs in it."""
        began = time.monotonic_ns()
        self._start(ordinal)
        if self._spans.on:
            layer, now = self._layer(ordinal), time.monotonic_ns()
            self._spans.add(
                Lane.COMPUTE, "launch", began, now, layer, owner=self._transfer.owner(ordinal)
            )

    def _start(self, ordinal: int) -> None:
        """Submit the broadcast of target bundle ``ordinal``; returns without waiting for it."""
        step = self._step
        assert step is not None and self._in_flight is None
        bundle = self._layout.placement.bundles[ordinal]
        transfer, settings = self._device.transfer, self._settings
        mode = choose_mode(
            bundle, step.history, settings.policy, settings.cost, self._staging_bytes
        )
        transfer.wait(self._device.compute.record(), f"computation before layer {bundle.layer}")
        status = status_known = None
        if step.guarded:
            status, status_known = self._start_status(ordinal, step.fences.get(bundle.layer))
        self._transfer.start(ordinal, mode, step.history, step.index)
        self._in_flight = _InFlight(ordinal, transfer.record(), status, status_known)
        self._count(mode, ordinal, step.history)

    def _start_status(self, ordinal: int, fence: Fence | None) -> tuple[torch.Tensor, Event]:
        """Submit the owner's load status; hold the data back until the load has ended."""
        owner = self._layout.placement.owners[ordinal]
        status = torch.full((1,), _LoadStatus.OK, dtype=torch.int64)
        if fence is not None and owner == self._group.rank:
            load = _Load(fence)
            deadline = time.monotonic() + self._settings.load_timeout
            what = f"the load of layer {self._layer(ordinal)}"
            self._device.transfer.wait_fence(fence, self._settings.load_timeout, what)
            self._device.transfer.run(load.decide, f"the outcome of {what}")
            # An accelerator's transfer stream has spent the time by now.
            self._control.wait_fence(fence, max(deadline - time.monotonic(), 0), what)
            self._control.run(lambda: load.report(status), f"the status of {what}")
        self._control.collective(
            lambda: self._group.broadcast_control(status, owner),
            f"the load status of layer {self._layer(ordinal)} from rank {self._group.ranks[owner]}",
        )
        return status, self._control.record()

    def _wait_for(self, ordinal: int) -> None:
        in_flight = self._in_flight
        assert in_flight is not None and in_flight.ordinal == ordinal
        if in_flight.status is not None and in_flight.status_known is not None:
            in_flight.status_known.wait(
                self._settings.transfer_timeout + self._settings.load_timeout
            )
            status = _LoadStatus(int(in_flight.status))
            if status is not _LoadStatus.OK:
                self._load_failed(ordinal, status)
        self._device.compute.wait(in_flight.done, f"the broadcast of layer {self._layer(ordinal)}")
        self._in_flight = None

    def _load_failed(self, ordinal: int, status: _LoadStatus) -> None:
        self.stats.load_failures += 1
        assert self._step is not None
        if self._step.on_load_failed is not None:
            self._step.on_load_failed(self._layer(ordinal), status is _LoadStatus.TIMED_OUT)
            return
        fence = self._step.fences.get(self._layer(ordinal))
        cause = _error_of(fence) if fence is not None and fence.done() else None
        owner = self._transfer.owner(ordinal)
        how = (
            "failed"
            if status is _LoadStatus.FAILED
            else f"did not end within {self._settings.load_timeout:.1f} s"
        )
        raise LoadFailed(
            f"the load of layer {self._layer(ordinal)} {how} on its owner, rank {owner}; "
            "the layer's history is not valid on any rank"
        ) from cause

    def _count_wait(self, ordinal: int, began: int, ended: int) -> None:
        layer = self._layer(ordinal)
        self.stats.waited(layer, ended - began)
        if self._spans.on:
            self._spans.add(
                Lane.WAIT, "wait", began, ended, layer, owner=self._transfer.owner(ordinal)
            )

    def _record_compute(self, until: int) -> None:
        """The layer acquired last has been computed, and what lies before the next one."""
        if self._spans.on and self._current >= 0:
            layer, owner = self._layer(self._current), self._transfer.owner(self._current)
            self._spans.add(Lane.COMPUTE, "layer", self._computing_since, until, layer, owner=owner)

    def _count(self, mode: Mode, ordinal: int, history: History) -> None:
        bundle = self._layout.placement.bundles[ordinal]
        self.stats.broadcasts[mode] += 1
        self.stats.bytes[mode] += mode_bytes(mode, bundle, history)
        self.stats.active_history_bytes += mode_bytes(Mode.PACKED, bundle, history)
        self.stats.full_bytes += mode_bytes(Mode.FULL, bundle, history)

    def _poison(self) -> None:
        for slot in self._layout.slots:
            self._buffer[slot.offset : slot.end].view(torch.uint8).fill_(POISON)

    def _layer(self, ordinal: int) -> int:
        return self._layout.placement.bundles[ordinal].layer

    def _after(self, ordinal: int) -> str:
        bundles = self._layout.placement.bundles
        if ordinal < 0:
            return "the start of the step"
        return f"layer {bundles[ordinal].layer}" if ordinal < len(bundles) else "the last layer"


class _Load:
    """The outcome of a load, decided once, at the first call.

    The transfer stream decides just before it sends the layer, so a load that ends late, after
    older bytes have been sent, cannot count as a success.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._lock = threading.Lock()
        self._status: _LoadStatus | None = None

    def decide(self) -> None:
        self._decided()

    def report(self, status: torch.Tensor) -> None:
        status.fill_(self._decided())

    def _decided(self) -> _LoadStatus:
        with self._lock:
            if self._status is None:
                self._status = self._look()
            return self._status

    def _look(self) -> _LoadStatus:
        if not self._fence.done():
            return _LoadStatus.TIMED_OUT
        return _LoadStatus.OK if _error_of(self._fence) is None else _LoadStatus.FAILED


def _error_of(fence: Fence) -> BaseException | None:
    """The error of a fence that is done; exception() would raise if it was cancelled."""
    return CancelledError() if fence.cancelled() else fence.exception()
