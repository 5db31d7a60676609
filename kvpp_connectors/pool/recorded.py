"""What a pool's loads and saves leave in a trace (docs/performance.md)."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvpp_connectors.pool.store.base import Outcome
from kvpp_core.trace import Lane, SpanRecorder

__all__ = ["recorded"]


def recorded(
    spans: SpanRecorder,
    lane: Lane,
    move: Callable[[], list[Outcome]],
    object_bytes: int,
    name: str | None = None,
    layer: int | None = None,
) -> list[Outcome]:
    """The outcomes of ``move``, which loads or saves objects of this size, and a span of it."""
    began = time.monotonic_ns()
    outcomes = move()
    if spans.on:
        blocks, failed = len(outcomes), sum(not outcome.ok for outcome in outcomes)
        spans.add(
            lane, name or lane.value, began, time.monotonic_ns(), layer,
            bytes=blocks * object_bytes, blocks=blocks, failed=failed,
        )  # fmt: skip
    return outcomes
