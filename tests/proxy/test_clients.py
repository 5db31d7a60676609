"""Field report 2.2: clients that go away, in every phase, and what is cancelled and released."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.proxy.backend import Backend, Received, chunk, events, hang, stand_still
from tests.proxy.world import World, looped, until, world


async def gone(task: asyncio.Task[Any]) -> None:
    """Close the client's connection."""
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("stream", [False, True])
@looped
async def test_a_client_that_leaves_during_prefill(stream: bool) -> None:
    """Prefill's call is cancelled; decode gets no request; there is nothing to release yet."""
    async with world() as w:
        w.p[0].usual = hang
        asking = w.asking(stream=stream)
        await until(lambda: w.p[0].received)
        await gone(asking)
        await until(lambda: w.p[0].received[0].cancelled)
        await w.comes_true("requests_total", 1.0, outcome="client_gone")
        assert w.d[0].received == []
        assert w.releases == []
        assert len(w.p[0].received) == 1  # and there is no retry without a client


@pytest.mark.parametrize("stream", [False, True])
@looped
async def test_a_client_that_leaves_before_decodes_first_byte(stream: bool) -> None:
    """Decode's call is cancelled and the transfer released, once."""
    async with world(decodes=2) as w:
        for node in w.d:
            node.usual = hang
        asking = w.asking(stream=stream)
        await until(lambda: w.offered)
        await gone(asking)
        await until(lambda: any(r.cancelled for node in w.d for r in node.received))
        await until(lambda: w.releases == w.offered)
        await w.comes_true("requests_total", 1.0, outcome="client_gone")
        assert len(w.p[0].received) == 1
    assert len(w.releases) == 1


@looped
async def test_a_client_that_leaves_in_the_middle_of_a_stream() -> None:
    """Decode's call is cancelled, so that it stops to generate, and the transfer released."""
    first_is_there = asyncio.Event()
    async with world() as w:
        w.d[0].usual = events(chunk("hello"), then=stand_still)
        asking = asyncio.create_task(w.stream(first_is_there))
        await first_is_there.wait()
        await gone(asking)
        await until(lambda: w.d[0].received[0].cancelled)
        await until(lambda: w.releases == w.offered)
        await w.comes_true("requests_total", 1.0, outcome="client_gone")


@looped
async def test_a_storm_of_clients_that_leave_occupies_nothing() -> None:
    """2.2: an abort storm held decode's slots for minutes each. All running counts return to 0."""
    async with world(2, 2) as w:
        for node in w.d:
            node.usual = hang
        tasks = [w.asking(stream=True) for _ in range(50)]
        await until(lambda: len(w.offered) == 50)
        for task in tasks:
            task.cancel()
        await until(lambda: all(r.cancelled for node in w.d for r in node.received))
        await until(lambda: len(w.releases) == 50)
        for leg, nodes in (("prefill", w.p), ("decode", w.d)):
            for node in nodes:
                await w.comes_true("node_requests", 0.0, leg=leg, node=node.url)
        released = [params["remote_request_id"] for params in w.releases]
        assert len(set(released)) == 50


@asynccontextmanager
async def deaf_node() -> AsyncIterator[str]:
    """The URL of a node that is healthy, and takes a request's header but not its body."""
    held: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.read(10)).startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            writer.close()
        else:
            assert isinstance(writer.transport, asyncio.ReadTransport)
            writer.transport.pause_reading()
            held.append(writer)  # nothing else refers to a transport that does not read

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for writer in held:
        writer.transport.abort()
    server.close()


@pytest.mark.parametrize("leaves", [True, False])
@looped
async def test_a_node_that_does_not_take_the_body_is_given_up(leaves: bool) -> None:
    """When the client leaves, and at the bound: the call hangs in sending, not in waiting."""
    bound = 60.0 if leaves else 1.0
    async with (
        deaf_node() as url,
        world(prefill=(url,), prefill_timeout=bound, retries=0, probe_interval=60.0) as w,
    ):
        asking = w.asking(prompt="x" * (32 << 20))  # more than fits into any buffer of a socket
        if leaves:
            await w.comes_true("node_requests", 1.0, leg="prefill", node=url)
            await gone(asking)
            await w.comes_true("requests_total", 1.0, outcome="client_gone")
        else:
            assert (await asking).status == 504
        await w.comes_true("node_requests", 0.0, leg="prefill", node=url)


async def flood(backend: Backend, request: web.Request, received: Received) -> web.StreamResponse:
    """A stream without an end, as fast as it is taken."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    while True:
        await response.write(chunk("x" * 100_000))


def raw_client(w: World, head: str, body: bytes = b"") -> socket.socket:
    """A client's socket that has sent this much and reads nothing."""
    client = socket.create_connection(("127.0.0.1", w.port))
    client.sendall(head.replace("\n", "\r\n").encode() + body)
    return client


POST = "POST /v1/completions HTTP/1.1\nHost: x\nContent-Length: {}\n\n"


@looped
async def test_a_client_that_takes_nothing_is_dropped() -> None:
    """It would hold decode's slot for ever."""
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    async with world(client_timeout=1.0) as w:
        w.d[0].usual = flood
        with raw_client(w, POST.format(len(body)), body):
            await until(lambda: w.d[0].received and w.d[0].received[0].over.is_set())
            await w.comes_true("requests_total", 1.0, outcome="client_gone")
            await until(lambda: w.releases == w.offered)


@looped
async def test_a_client_that_sends_half_a_body_is_told_so() -> None:
    """408 after the bound, and no node has heard of it."""
    async with world(client_timeout=1.0) as w:
        with raw_client(w, POST.format(100), b'{"prompt":') as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            assert (await loop.sock_recv(client, 1000)).startswith(b"HTTP/1.1 408 ")
        assert await w.metric("requests_total", outcome="invalid") == 1
        assert w.p[0].received == []


@looped
async def test_a_client_that_leaves_in_the_middle_of_its_body() -> None:
    async with world() as w:
        raw_client(w, POST.format(100), b'{"prompt":').close()
        await w.comes_true("requests_total", 1.0, outcome="client_gone")
        assert w.p[0].received == []
