"""What every trace file must be, whoever recorded it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from kvpp_core.trace import Lane

__all__ = ["check_events", "events_of"]

LANES = [lane.value for lane in Lane]
_NS = 0.002  # us: times are whole ns, written as floats


def events_of(trace: dict[str, Any], rank: int, lane: str) -> list[dict[str, Any]]:
    """The spans of one row, in order."""
    row = LANES.index(lane)
    found = [e for e in trace["traceEvents"] if (e["ph"], e["pid"], e["tid"]) == ("X", rank, row)]
    return sorted(found, key=lambda e: (e["ts"], -e["dur"]))


def check_events(trace: dict[str, Any], ranks: int) -> None:
    """Chrome's format: named rows, complete events that do not go backwards, and nest in a row."""
    assert trace["displayTimeUnit"] == "ms"
    names: dict[str, dict[tuple[int, int], Any]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        assert event["ph"] in "MX"
        assert event["pid"] in range(ranks) and event["tid"] in range(len(LANES))
        if event["ph"] == "M":
            (value,) = event["args"].values()
            names[event["name"]][event["pid"], event["tid"]] = value
        else:
            assert event["name"] and event["cat"] == LANES[event["tid"]]
            assert event["ts"] >= 0 and event["dur"] >= 0
            assert event["args"]["step"] >= 0
    assert names["process_name"] == {(rank, 0): f"rank {rank}" for rank in range(ranks)}
    assert names["thread_name"] == {
        (rank, row): lane for rank in range(ranks) for row, lane in enumerate(LANES)
    }
    for rank in range(ranks):
        for lane in LANES:
            _check_nesting(events_of(trace, rank, lane))


def _check_nesting(row: list[dict[str, Any]]) -> None:
    """A viewer draws a span below another only if it lies within."""
    open_until: list[float] = []
    for event in row:
        while open_until and open_until[-1] <= event["ts"] + _NS:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1] + _NS, event
        open_until.append(end)
