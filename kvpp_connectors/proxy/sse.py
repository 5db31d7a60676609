"""Server-sent events of a streamed answer: where events, errors and answers begin and end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["EventBuffer", "begins_answer", "error_event", "is_done", "split_at_error"]

_DONE = b"[DONE]"


class EventBuffer:
    """Cuts a byte stream into whole events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """The events that ``chunk`` completes; the rest is kept for the next chunk."""
        if not self._rest and chunk.endswith(b"\n\n"):
            return chunk
        data = self._rest + chunk
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        if end < 4:  # neither found
            end = 0
        self._rest = data[end:]
        return data[:end]


def is_done(events: bytes) -> bool:
    """Whether ``[DONE]``, the end of a complete answer, is among whole events."""
    return _DONE in events and _DONE in _payloads(events)


def begins_answer(events: bytes) -> bool:
    """Whether whole events hold a part of an answer.

    Comments, ``[DONE]`` and a chunk that only names the role do not count: vLLM sends the role
    before it checks whether its engine has failed.
    """
    return any(map(_is_answer, _payloads(events)))


def split_at_error(events: bytes) -> tuple[bytes, Mapping[str, Any] | None]:
    """The events before the first error event, and its error object; all and None without one."""
    if b'"error"' not in events:
        return events, None
    start = 0
    for event in _split(events):
        for payload in _payloads(event):
            error = _object(payload).get("error")
            if error:
                return events[:start], error if isinstance(error, dict) else {"message": error}
        start += len(event)
    return events, None


def error_event(error: Mapping[str, Any]) -> bytes:
    """An error as the last event of a stream, as OpenAI's clients expect it."""
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


def _split(events: bytes) -> Iterator[bytes]:
    """Whole events one by one, with the blank line that ends them."""
    start = 0
    lines = events.splitlines(keepends=True)
    position = 0
    for line in lines:
        position += len(line)
        if not line.strip():
            yield events[start:position]
            start = position
    if start < len(events):
        yield events[start:]


def _payloads(events: bytes) -> Iterator[bytes]:
    for line in events.splitlines():
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _object(payload: bytes) -> dict[str, Any]:
    """A payload's JSON object; empty if it is not one."""
    try:
        value = json.loads(payload)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_answer(payload: bytes) -> bool:
    return any(map(_has_content, _object(payload).get("choices") or ()))


def _has_content(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
        return True  # a completion's text, empty or not, or the end of an answer
    return any(value for name, value in delta.items() if name != "role")
