"""Field report 8.1: what a back-end's failure becomes for the client. Never an empty success."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.proxy.backend import (
    DONE,
    Answer,
    Backend,
    Ending,
    broken_stream,
    chunk,
    empty,
    events,
    hang,
    late,
    offer,
    reset,
    reset_connection,
    stand_still,
    whole,
)
from tests.proxy.world import Got, World, looped, until, world

ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
MESSAGE = {"error": {"message": "your mistake", "type": "T", "param": "p", "code": 400}}


def error_event(code: int) -> bytes:
    """An error inside a stream, as vLLM sends it."""
    error = {"message": "no cache", "type": "T", "param": None, "code": code}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


def bounds(leg: str, seconds: float) -> dict[str, Any]:
    """Short bounds for one leg; the other one must reach none on a busy machine."""
    decode = ("decode_first_byte_timeout", "decode_timeout")
    return dict.fromkeys(("prefill_timeout",) if leg == "prefill" else decode, seconds)


def node_of(w: World, leg: str, number: int = 0) -> Backend:
    """A back-end of a leg."""
    return (w.p if leg == "prefill" else w.d)[number]


def request_count(w: World, leg: str) -> int:
    """How many requests a leg's nodes have had."""
    return sum(len(node.received) for node in (w.p if leg == "prefill" else w.d))


async def fail_first(w: World, leg: str, failure: Answer) -> None:
    """The first request of a leg fails, on whichever node it lands."""
    failed = False

    def once(usual: Answer) -> Answer:
        async def answer(*arguments: Any) -> Any:
            nonlocal failed
            if not failed:
                failed = True
                return await failure(*arguments)
            return await usual(*arguments)

        return answer

    for node in w.p if leg == "prefill" else w.d:
        node.usual = once(node.usual)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
@looped
async def test_a_4xx_is_forwarded_unchanged_and_not_retried(
    status: int, leg: str, stream: bool
) -> None:
    """Status, message and what belongs to them; and the other node gets no request."""
    async with world(2, 2) as w:
        headers = {"Retry-After": "17", "WWW-Authenticate": "Bearer"}
        for node in (node_of(w, leg), node_of(w, leg, 1)):
            node.usual = whole(status, MESSAGE, **headers)
        got = await w.ask(stream=stream)
        assert got.status == status
        assert got.json == MESSAGE
        assert {name: got.headers[name] for name in headers} == headers
        assert request_count(w, leg) == 1
        assert request_count(w, "prefill") == 1
        assert await w.metric("requests_total", outcome="refused") == 1
        assert await w.metric("retries_total", leg=leg) == 0
        assert await w.metric("node_healthy", leg=leg, node=node_of(w, leg).url) == 1


# Failures of a back-end, and whether they are a timeout.
FAILURES: dict[str, tuple[Answer, bool]] = {
    "500": (whole(500, {"error": {"message": "CUDA on fire"}}), False),
    "503": (whole(503, b""), False),
    "redirect": (whole(307, b"", Location="http://127.0.0.1:1/"), False),
    "reset": (reset, False),
    "hang": (hang, True),
    "empty": (empty, False),
}
DECODE_FAILURES: dict[str, tuple[Answer, bool]] = {
    **FAILURES,
    "no event": (events(), False),
    "reset before an event": (broken_stream(), False),
    "half an event": (broken_stream(b'data: {"choi'), False),
    "only the mark of the end": (events(DONE), False),
    "only a role": (events(ROLE, DONE), False),
    "reset after a role": (broken_stream(ROLE), False),
    "hang after a role": (events(ROLE, then=stand_still), True),
    "hang after a keep-alive": (events(b": keep-alive\n\n", then=stand_still), True),
    "an error event": (events(error_event(500), DONE), False),
    "an error event after a role": (events(ROLE, error_event(500), DONE), False),
    "only usage": (events(b'data: {"choices": [], "usage": {}}\n\n', DONE), False),
}
PREFILL_FAILURES: dict[str, tuple[Answer, bool]] = {
    **FAILURES,
    "no JSON": (whole(200, b"<html>"), False),
    "no choice": (whole(200, {"choices": []}), False),
    "no object": (whole(200, b"[1]"), False),
}
CASES = [
    *(pytest.param("prefill", name, id=f"prefill-{name}") for name in PREFILL_FAILURES),
    *(pytest.param("decode", name, id=f"decode-{name}") for name in DECODE_FAILURES),
]


def failure_of(leg: str, name: str) -> tuple[Answer, bool]:
    """A failure of the tables above."""
    return (PREFILL_FAILURES if leg == "prefill" else DECODE_FAILURES)[name]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("leg", "name"), CASES)
@looped
async def test_a_failure_before_the_first_chunk_is_mended_by_another_node(
    leg: str, name: str, stream: bool
) -> None:
    """The client sees nothing of it; a further try of decode comes with a prefill of its own."""
    failure, timed_out = failure_of(leg, name)
    async with world(2, 2, **(bounds(leg, 0.5) if timed_out else {})) as w:
        await fail_first(w, leg, failure)
        got = await w.ask(stream=stream)
        assert got.status == 200
        assert b"hello" in got.body and b"world" in got.body
        assert [len(node.received) for node in (w.p if leg == "prefill" else w.d)] == [1, 1]
        assert request_count(w, "prefill") == 2
        assert await w.metric("retries_total", leg=leg) == 1
        assert await w.metric("requests_total", outcome="ok") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("leg", "name"), CASES)
@looped
async def test_a_failure_that_nothing_mends_names_leg_and_node_and_what_happened(
    leg: str, name: str, stream: bool
) -> None:
    """502, or 504 after a timeout, in OpenAI's shape of an error; never an empty 200."""
    failure, timed_out = failure_of(leg, name)
    async with world(retries=1, **(bounds(leg, 0.2) if timed_out else {})) as w:
        node = node_of(w, leg)
        node.usual = failure
        got = await w.ask(stream=stream)
        assert got.status == (504 if timed_out else 502)
        assert got.headers["Content-Type"].startswith("application/json")
        assert got.error["code"] == got.status
        assert got.error["leg"] == leg
        assert got.error["node"] == node.url
        start = f"{leg} on {node.url} failed: "
        assert got.error["message"].startswith(start)
        assert len(got.error["message"]) > len(start) + 10
        assert request_count(w, leg) == 2
        assert await w.metric("requests_total", outcome="failed") == 1


@looped
async def test_the_back_ends_own_message_is_in_the_error() -> None:
    async with world(retries=0) as w:
        w.d[0].usual = FAILURES["500"][0]
        message = (await w.ask()).error["message"]
        assert "500" in message and "CUDA on fire" in message
        w.d[0].usual = events(error_event(500))
        assert "no cache" in (await w.ask(stream=True)).error["message"]


@looped
async def test_a_clients_error_inside_the_stream_gets_its_status() -> None:
    """vLLM finds some mistakes after it has begun to stream; nothing was sent, so it is a 4xx."""
    async with world() as w:
        w.d[0].usual = events(ROLE, error_event(400), DONE)
        got = await w.ask(stream=True)
        assert (got.status, got.error["message"]) == (400, "no cache")
        assert request_count(w, "decode") == 1


def assert_cut(got: Got, *texts: str) -> dict[str, Any]:
    """A stream with these texts, ended by one error event and nothing after it."""
    assert got.status == 200
    *chunks, last = (json.loads(event) for event in got.events)
    assert [event["choices"][0]["text"] for event in chunks] == list(texts)
    assert list(last) == ["error"]
    assert b"[DONE]" not in got.body
    error: dict[str, Any] = last["error"]
    return error


async def garbage(request: web.Request) -> None:
    """Bytes that are no HTTP instead of a chunk. aiohttp reports them to no reader."""
    assert isinstance(request.transport, asyncio.WriteTransport)
    request.transport.write(b"zz\r\nno chunk\r\n")
    await asyncio.Event().wait()


HALF = b'data: {"choices": [{"te'
LATE_FAILURES: dict[str, tuple[bytes, Ending]] = {
    "reset": (b"", reset_connection),
    "reset inside an event": (HALF, reset_connection),
    "end without the mark": (b"", None),
    "end inside an event": (HALF, None),
    "hang": (b"", stand_still),
    "garbage": (b"", garbage),
}


@pytest.mark.parametrize("name", LATE_FAILURES)
@looped
async def test_a_failure_after_the_first_chunk_ends_the_stream_with_an_error_event(
    name: str,
) -> None:
    """Whole events, then the error; no [DONE], no further try, the transfer is released."""
    timed_out = name in ("hang", "garbage")
    bound: dict[str, Any] = {"stream_idle_timeout": 0.5} if timed_out else {}
    gate = asyncio.Event()
    async with world(decodes=2, **bound) as w:
        for node in w.d:
            node.usual = late(gate, *LATE_FAILURES[name])
        error = assert_cut(await w.stream(gate), "hello")
        assert error["leg"] == "decode"
        assert error["node"] in {node.url for node in w.d}
        assert error["message"].startswith(f"decode on {error['node']} failed: ")
        assert error["code"] == (504 if timed_out else 502)
        assert request_count(w, "decode") == 1
        await until(lambda: w.releases == w.offered)
        assert await w.metric("requests_total", outcome="cut") == 1


@looped
async def test_decodes_own_error_event_ends_the_stream_as_decode_sent_it() -> None:
    """Field report 8.3: an answer that broke off must not look complete, so no [DONE]."""
    gate = asyncio.Event()
    async with world() as w:
        w.d[0].usual = late(gate, chunk("wor") + error_event(500) + DONE)
        error = assert_cut(await w.stream(gate), "hello", "wor")
        assert error == {"message": "no cache", "type": "T", "param": None, "code": 500}


@looped
async def test_what_comes_after_the_mark_of_the_end_does_not_matter() -> None:
    async with world() as w:
        w.d[0].usual = broken_stream(chunk("hello"), DONE)
        got = await w.ask(stream=True)
        assert got.body == chunk("hello") + DONE
        assert await w.metric("requests_total", outcome="ok") == 1


@looped
async def test_an_answer_that_breaks_off_is_not_forwarded_in_part() -> None:
    """Not streamed: nothing was sent to the client yet, so another node may answer."""

    async def half(backend: Backend, request: Any, received: Any) -> Any:
        request.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
            b'Content-Length: 1000\r\n\r\n{"choices": ['
        )
        request.transport.close()
        return None

    async with world(decodes=2) as w:
        await fail_first(w, "decode", half)
        got = await w.ask()
        assert got.json["choices"][0]["text"] == "hello world"
        w.d[0].usual = w.d[1].usual = half
        assert (await w.ask()).status == 502


@looped
async def test_a_prefill_that_fails_means_that_decode_is_never_asked() -> None:
    """Field report 8.3, for every way in which prefill fails."""
    async with world(retries=0, prefill_timeout=0.5) as w:
        for failure, _ in (*PREFILL_FAILURES.values(), (whole(400, MESSAGE), False)):
            w.p[0].usual = failure
            assert (await w.ask(stream=True)).status >= 400
        assert w.d[0].received == []
        w.p[0].usual = offer()
        assert (await w.ask(stream=True)).status == 200
