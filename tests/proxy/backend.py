"""Stub back-ends: real HTTP servers on loopback that answer as each test defines.

A back-end plays its ``script`` first, one entry per request, then its ``usual`` answer for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

__all__ = [
    "DONE",
    "Answer",
    "Backend",
    "Ending",
    "Received",
    "answers",
    "broken_stream",
    "chunk",
    "empty",
    "events",
    "gated",
    "hang",
    "late",
    "offer",
    "reset",
    "reset_connection",
    "stand_still",
    "whole",
]

DONE = b"data: [DONE]\n\n"
Answer = Callable[["Backend", web.Request, "Received"], Awaitable[web.StreamResponse]]

Ending = Callable[[web.Request], Awaitable[None]] | None  # of a stream


@dataclass
class Received:
    """A request as a back-end saw it."""

    path: str
    headers: Mapping[str, str]  # by any case
    body: dict[str, Any]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False  # the proxy closed the connection before it was answered

    @property
    def params(self) -> Any:
        """Its kv_transfer_params, or "absent"."""
        return self.body.get("kv_transfer_params", "absent")

    @property
    def request_id(self) -> str:
        """Its X-Request-Id."""
        return self.headers["X-Request-Id"]


@dataclass
class Backend:
    """One node. ``received`` holds its completion requests in the order of their arrival."""

    usual: Answer
    script: deque[Answer] = field(default_factory=deque)
    received: list[Received] = field(default_factory=list)
    health: int = 200
    health_hangs: bool = False
    port: int = 0
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it listens; the same after a restart."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, at the old port if there was one."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening; running requests are cut."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        if self.health_hangs:
            await asyncio.Event().wait()
        return web.Response(status=self.health)

    async def _models(self, request: web.Request) -> web.Response:
        seen = request.headers.get("Authorization")
        return web.json_response({"data": [{"id": "m"}], "authorization": seen})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        received = Received(request.path, request.headers, body)
        self.received.append(received)
        try:
            answer = self.script.popleft() if self.script else self.usual
            return await answer(self, request, received)
        except asyncio.CancelledError:
            received.cancelled = True
            raise
        finally:
            received.over.set()


_COUNT = itertools.count()


def offer(**more: Any) -> Answer:
    """Prefill's usual answer: transfer data that no other prefill has."""

    async def answer(
        backend: Backend, request: web.Request, received: Received
    ) -> web.StreamResponse:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": backend.url,
            "remote_request_id": f"prefill-{next(_COUNT)}",
            "remote_block_ids": [[1, 2, 3]],
        }
        return web.json_response(
            {
                "choices": [{"text": "a", "finish_reason": "length"}],
                "kv_transfer_params": params,
                **more,
            }
        )

    return answer


def chunk(text: str) -> bytes:
    """One event of a streamed completion."""
    return f'data: {{"choices": [{{"text": "{text}", "finish_reason": null}}]}}\n\n'.encode()


async def answers(backend: Backend, request: web.Request, received: Received) -> web.StreamResponse:
    """Decode's usual answer: "hello" and "world", streamed if the request says so."""
    if not received.body.get("stream"):
        return web.json_response({"choices": [{"text": "hello world", "finish_reason": "stop"}]})
    return await events(chunk("hello"), chunk("world"), DONE)(backend, request, received)


def events(*parts: bytes, then: Ending = None) -> Answer:
    """A stream of these parts, which ends there or does something ``then``."""

    async def answer(
        backend: Backend, request: web.Request, received: Received
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        if then is not None:
            await then(request)
        await response.write_eof()
        return response

    return answer


def late(gate: asyncio.Event, second: bytes, ending: Ending = None) -> Answer:
    """A stream whose second part and end come when the client has the first."""

    async def answer(
        backend: Backend, request: web.Request, received: Received
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk("hello"))
        await gate.wait()
        await response.write(second)
        if ending is not None:
            await ending(request)
        return response

    return answer


async def reset_connection(request: web.Request) -> None:
    """Drop the connection as a server that was killed does."""
    assert request.transport is not None
    request.transport.abort()


def broken_stream(*parts: bytes) -> Answer:
    """A stream that is cut after these parts."""
    return events(*parts, then=reset_connection)


def whole(status: int, body: bytes | dict[str, Any], **headers: str) -> Answer:
    """A status with a body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def answer(
        backend: Backend, request: web.Request, received: Received
    ) -> web.StreamResponse:
        return web.Response(
            status=status, body=data, headers={"Content-Type": "application/json", **headers}
        )

    return answer


empty = whole(200, b"")


async def reset(backend: Backend, request: web.Request, received: Received) -> web.StreamResponse:
    """No answer: the connection is dropped."""
    await reset_connection(request)
    return web.Response()


async def hang(backend: Backend, request: web.Request, received: Received) -> web.StreamResponse:
    """No answer, until the other side goes away."""
    await asyncio.Event().wait()
    return web.Response()


async def stand_still(request: web.Request) -> None:
    """Say nothing more, for use as ``then``."""
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    raise asyncio.CancelledError


def gated(gate: asyncio.Event, then: Answer) -> Answer:
    """Wait for the gate, then answer."""

    async def answer(
        backend: Backend, request: web.Request, received: Received
    ) -> web.StreamResponse:
        await gate.wait()
        return await then(backend, request, received)

    return answer
