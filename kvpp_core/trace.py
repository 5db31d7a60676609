"""The spans of a rank's last steps, for `python -m benchmarks trace`.

The code that does something records its span. Times are nanoseconds of CLOCK_MONOTONIC, which all
processes of a Linux machine share, so that the ranks of one machine need no alignment. They are the
host's: for work on an accelerator, the time of its launch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["BroadcastSpans", "Lane", "Recording", "Span", "SpanRecorder", "StepSpans"]

_MOST_SPANS = 8192  # of one step; 78 layers in one message each make about 700


class Lane(StrEnum):
    """What a span belongs to; spans of one lane nest or follow one another."""

    COMPUTE = "compute"  # the forward's thread, but for its waits
    WAIT = "wait"  # the forward's thread: exposed waits, as PipelineStats counts them
    BROADCAST = "broadcast"
    EXCHANGE = "exchange"  # the forward's thread too: decode at the owner
    LOAD = "load"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran from ``begin`` to ``end``, in ns."""

    lane: Lane
    name: str
    layer: int | None  # transformer layer, None for what concerns no single one
    begin: int
    end: int
    facts: Mapping[str, int | str] = field(default_factory=dict)  # owner, bytes, blocks, ...

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.begin) / 1e9


@dataclass(frozen=True, slots=True)
class StepSpans:
    """The spans that began in one step, or after it and before the next one."""

    number: int  # counted since recording was started: the same on all ranks
    begin: int  # ns
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class Recording:
    """The last steps, and how many spans are missing from what was recorded."""

    steps: list[StepSpans]
    dropped: int


class SpanRecorder:
    """Keeps the spans of the last steps while it is on; off at first. For all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: deque[StepSpans] | None = None  # None: off
        self._most = 0
        self._begun = 0
        self._dropped = 0

    @property
    def on(self) -> bool:
        """Whether spans are kept. Check it before computing a span's facts."""
        return self._steps is not None

    def start(self, steps: int, most_spans: int = _MOST_SPANS) -> None:
        """Start anew: keep the last ``steps`` steps, and at most ``most_spans`` of each."""
        with self._lock:
            self._steps = deque(maxlen=steps)
            self._most, self._begun, self._dropped = most_spans, 0, 0

    def take(self) -> Recording:
        """What was kept since start(); recording is off again."""
        with self._lock:
            steps, self._steps = self._steps, None
            return Recording(list(steps or ()), self._dropped)

    def begin_step(self, now: int) -> None:
        """Spans that begin at ``now`` (ns) or later belong to another step."""
        with self._lock:
            if self._steps is None:
                return
            if len(self._steps) == self._steps.maxlen:
                self._dropped += len(self._steps[0].spans)
            self._steps.append(StepSpans(self._begun, now, []))
            self._begun += 1

    def add(
        self,
        lane: Lane,
        name: str,
        begin: int,
        end: int,
        layer: int | None = None,
        **facts: int | str,
    ) -> None:
        """Keep a span in the step in which it began, if that is kept."""
        with self._lock:
            if self._steps is None:
                return
            for step in reversed(self._steps):
                if step.begin <= begin and len(step.spans) < self._most:
                    step.spans.append(Span(lane, name, layer, begin, end, facts))
                    return
                if step.begin <= begin:
                    break
            self._dropped += 1


class BroadcastSpans:
    """The parts of one layer's broadcast on this rank: queued, pack, send, unpack.

    Made when the broadcast is submitted; ``queued`` ends when its first part begins. While the
    recorder is off, operations are not wrapped.
    """

    def __init__(self, spans: SpanRecorder, layer: int, owner: int, mode: str) -> None:
        self._spans = spans if spans.on else None
        self._layer, self._owner, self._mode = layer, owner, mode
        self._submitted: int | None = time.monotonic_ns()

    def timed(
        self, name: str, op: Callable[[], None], nbytes: int, blocks: int
    ) -> Callable[[], None]:
        """``op``, which records itself when it runs."""
        if self._spans is None:
            return op

        def run() -> None:
            begin = self._begin()
            op()
            self._add(name, begin, nbytes, blocks)

        return run

    def sending(self, nbytes: int, blocks: int) -> Callable[[], None] | None:
        """A send begins: call the result once it has ended; more calls do nothing. None: off."""
        if self._spans is None:
            return None
        begin, once = self._begin(), threading.Lock()

        def ended() -> None:
            if once.acquire(blocking=False):  # never released
                self._add("send", begin, nbytes, blocks)

        return ended

    def _begin(self) -> int:
        now = time.monotonic_ns()
        if self._submitted is not None and self._spans is not None:
            self._spans.add(
                Lane.BROADCAST, "queued", self._submitted, now, self._layer, owner=self._owner
            )
            self._submitted = None
        return now

    def _add(self, name: str, begin: int, nbytes: int, blocks: int) -> None:
        assert self._spans is not None
        self._spans.add(
            Lane.BROADCAST, name, begin, time.monotonic_ns(), self._layer,
            owner=self._owner, mode=self._mode, bytes=nbytes, blocks=blocks,
        )  # fmt: skip
