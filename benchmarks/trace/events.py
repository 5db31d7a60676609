"""Spans as Chrome trace events, for chrome://tracing and ui.perfetto.dev.

A process per rank, a row per lane. The parts of a layer's broadcast are nested in one event.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvpp_core.trace import Lane, Recording, Span, StepSpans

__all__ = ["chrome_trace"]

Event = dict[str, Any]

_NS = 1e3  # in the microsecond that trace events count in


def chrome_trace(recordings: Sequence[Recording]) -> Event:
    """The trace of all ranks as a JSON object; its time 0 is when the first step begins."""
    start = min((step.begin for found in recordings for step in found.steps[:1]), default=0)
    events: list[Event] = []
    for rank, recording in enumerate(recordings):
        events += _names(rank)
        for step in recording.steps:
            events += (_event(rank, step.number, span, start) for span in _rows(step))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(rank: int) -> Iterator[Event]:
    yield _meta(rank, 0, "process_name", {"name": f"rank {rank}"})
    yield _meta(rank, 0, "process_sort_index", {"sort_index": rank})
    for number, lane in enumerate(Lane):
        yield _meta(rank, number, "thread_name", {"name": lane.value})
        yield _meta(rank, number, "thread_sort_index", {"sort_index": number})


def _meta(rank: int, thread: int, name: str, args: Event) -> Event:
    return {"ph": "M", "pid": rank, "tid": thread, "name": name, "args": args}


def _rows(step: StepSpans) -> Iterator[Span]:
    """All spans, and one more around the parts of each layer's broadcast."""
    pieces: dict[int | None, list[Span]] = {}
    for span in step.spans:
        if span.lane is Lane.BROADCAST:
            pieces.setdefault(span.layer, []).append(span)
    yield from map(_around, pieces.values())
    yield from step.spans


def _around(pieces: Sequence[Span]) -> Span:
    sends = [piece for piece in pieces if piece.name == "send"]
    facts: dict[str, int | str] = {**sends[0].facts} if sends else {**pieces[0].facts}
    for name in ("bytes", "blocks"):
        facts[name] = sum(int(send.facts[name]) for send in sends)
    return Span(
        Lane.BROADCAST,
        "broadcast",
        pieces[0].layer,
        min(piece.begin for piece in pieces),
        max(piece.end for piece in pieces),
        facts,
    )


def _event(rank: int, step: int, span: Span, start: int) -> Event:
    inside = span.lane is Lane.BROADCAST and span.name != "broadcast"
    layer = {} if span.layer is None else {"layer": span.layer}
    return {
        "ph": "X",
        "pid": rank,
        "tid": list(Lane).index(span.lane),
        "cat": span.lane.value,
        "name": span.name if inside or span.layer is None else _title(span),
        "ts": (span.begin - start) / _NS,
        "dur": (span.end - span.begin) / _NS,
        "args": {"step": step, **layer, **span.facts},
    }


def _title(span: Span) -> str:
    what = "" if span.name in (span.lane, "layer") else f"{span.name} "
    return f"{what}layer {span.layer}"
