"""One worker's steps: from the scheduler's decision to the pipeline's begin, acquire and end.

    announce ──▶ begin (the model's forward starts) ──▶ acquire(component) ... ──▶ end
        │                                                                          ▲
        └── a step whose forward never starts: no tokens, nothing to broadcast ────┘
    abort: from anywhere, after an error

Dummy, profiling and warm-up runs are not announced, and nothing happens in their forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvpp_connectors.connector.process import LayerLoads
from kvpp_core.history import BlockHistory, ScheduledStep
from kvpp_core.pipeline import Pipeline
from kvpp_core.trace import Lane, SpanRecorder

__all__ = ["StepDriver"]


@dataclass(slots=True)
class _WorkerStep:
    """The step that runs, from its announcement to its end."""

    scheduled: ScheduledStep
    announced_ns: int
    begun: bool = False
    decode_tokens: int | None = None  # that attend at the owners; None: all attend here
    active_blocks: int = 0  # whose history is broadcast


class StepDriver:
    """Drives a pipeline through the steps of one worker. For the thread that runs the model."""

    def __init__(
        self,
        pipeline: Pipeline,
        block_size: int,
        layer_of: Mapping[str, int],
        loads: Callable[[], LayerLoads | None],
        spans: SpanRecorder,
        *,
        owner_decode: bool = False,
    ) -> None:
        """Without a step.

        Args:
            pipeline: what makes a layer readable; the driver alone begins and ends its steps.
            block_size: tokens of a block.
            layer_of: the transformer layer of each target component.
            loads: the connector that loads layers inside this step, or None.
            spans: records when what runs.
            owner_decode: decode tokens attend at the owner of each layer, so that their history
                is not broadcast.
        """
        self.pipeline = pipeline
        self.history = BlockHistory(block_size)
        self._layer_of = layer_of
        self._loads = loads
        self._spans = spans
        self._owner_decode = owner_decode
        self._step: _WorkerStep | None = None

    def announce(self, scheduled: ScheduledStep) -> None:
        """The scheduler's decision for the step whose forward is to come.

        Raises:
            KvppError: the step continues a request that this worker does not know.
        """
        began = time.monotonic_ns()
        if scheduled.requests:  # an engine with saves under way steps without any
            self._spans.begin_step(began)
        self.history.observe(scheduled)
        self._step = _WorkerStep(scheduled, began)

    def begin(self) -> None:
        """The model's forward starts, after the runner has copied and zeroed blocks.

        A second forward of one step, a draft model's warm-up for one, begins nothing.

        Raises:
            KvppError: a request claims more computed tokens than it has blocks for; or see
                `Pipeline.begin`.
        """
        step = self._step
        if step is None or step.begun:
            return
        step.begun = True
        loads = self._loads()
        fences = loads.take_fences() if loads is not None else None
        requests = step.scheduled.requests
        # Where layers are loaded in this step, their broadcasts carry how that went.
        if self._owner_decode and fences is None:
            requests = step.scheduled.prefills
            step.decode_tokens = step.scheduled.decode_tokens
        blocks = self.history.active(requests)
        step.active_blocks = len(blocks)
        self.pipeline.begin(
            blocks,
            fences,
            guarded=fences is not None,
            on_load_failed=loads.failed if loads is not None else None,
        )

    def acquire(self, component: str) -> None:
        """The first touch of a layer's cache: its load is submitted, then waited for.

        Raises:
            KvppError: see `Pipeline.acquire`.
        """
        if (loads := self._loads()) is not None:
            loads.reached(self._layer_of[component])
        self.pipeline.acquire(component)

    def decode_tokens(self) -> int | None:
        """Decode tokens of the running step that rely on attention at the owners.

        None: every token attends on its own rank, as in dummy and profiling runs.
        """
        return self._step.decode_tokens if self._step is not None else None

    def end(self) -> None:
        """The step's forward has ended, or never started.

        Raises:
            KvppError: see `Pipeline.end`.
        """
        step, self._step = self._step, None
        if step is None or not step.begun:
            return
        self.pipeline.end()
        self._record(step)

    def abort(self) -> None:
        """The step has failed: leave nothing of it in flight."""
        self._step = None
        self.pipeline.abort()

    def _record(self, step: _WorkerStep) -> None:
        if self._spans.on:
            requests = step.scheduled.requests
            self._spans.add(
                Lane.COMPUTE, step.scheduled.kind, step.announced_ns, time.monotonic_ns(),
                tokens=sum(request.new_tokens for request in requests), requests=len(requests),
                blocks=step.active_blocks,
            )  # fmt: skip
