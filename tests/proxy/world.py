"""A proxy between stub back-ends, and a client of it, in one event loop."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from kvpp_connectors.proxy.app import make_runner
from kvpp_connectors.proxy.options import ProxyOptions
from tests.proxy.backend import Backend, answers, offer

__all__ = ["BOUND_S", "Got", "World", "looped", "until", "world"]

BOUND_S = 30.0  # for anything that must happen; nothing waits for it where all is well


def looped(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own, with a bound."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 2 * BOUND_S))

    return run


async def until(condition: Callable[[], object]) -> None:
    """Wait until something has become true."""
    async with asyncio.timeout(BOUND_S):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass(frozen=True)
class Got:
    """What a client got, read to its end."""

    status: int
    headers: Mapping[str, str]  # by any case
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The error object of an error answer."""
        return self.json["error"]

    @property
    def events(self) -> list[str]:
        """The data of every event of a stream."""
        text = self.body.decode()
        assert text.endswith("\n\n")
        return [part.removeprefix("data: ") for part in text[:-2].split("\n\n")]


@dataclass
class World:
    """Everything a test touches."""

    p: list[Backend]
    d: list[Backend]
    url: str
    client: aiohttp.ClientSession
    releases: list[dict[str, Any]]  # parameters of released transfers, in order
    runner: web.AppRunner

    async def ask(self, path: str = "/v1/completions", **body: Any) -> Got:
        """A completion, not streamed by default."""
        return await self.post(path, {"prompt": "hi", "max_tokens": 7, **body})

    async def stream(self, first_is_there: asyncio.Event, **body: Any) -> Got:
        """A streamed completion; tells when its first event has arrived here."""
        data = {"prompt": "hi", "stream": True, **body}
        async with self.client.post(f"{self.url}/v1/completions", json=data) as response:
            first = await response.content.readuntil(b"\n\n")
            first_is_there.set()
            rest = await response.read()
            return Got(response.status, response.headers, first + rest)

    async def post(self, path: str, body: Any, **headers: str) -> Got:
        """Any request with a body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url + path, data=data, headers=headers) as response:
            got = await response.read()
            return Got(response.status, response.headers, got)

    async def get(self, path: str, **headers: str) -> Got:
        """Fetch a page of the proxy."""
        async with self.client.get(self.url + path, headers=headers) as response:
            return Got(response.status, response.headers, await response.read())

    def asking(self, **body: Any) -> asyncio.Task[Got]:
        """A completion in the background; cancelling the task closes the client's connection."""
        return asyncio.create_task(self.ask(**body))

    async def metric(self, name: str, **labels: str) -> float:
        """A figure of /metrics; 0 if it was never counted."""
        page = (await self.get("/metrics")).body.decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == f"kvpp_proxy_{name}" and sample.labels == labels:
                    return float(sample.value)
        return 0.0

    async def comes_true(self, name: str, value: float, **labels: str) -> None:
        """Wait until a figure of /metrics has a value."""
        async with asyncio.timeout(BOUND_S):
            while await self.metric(name, **labels) != value:
                await asyncio.sleep(0.002)

    @property
    def port(self) -> int:
        """Where the proxy listens."""
        port: int = self.runner.addresses[0][1]
        return port

    @property
    def offered(self) -> list[Any]:
        """The transfer data that decode nodes were sent, by node, in the order of arrival."""
        return [received.params for node in self.d for received in node.received]


@asynccontextmanager
async def world(
    prefills: int = 1,
    decodes: int = 1,
    release: Callable[[dict[str, Any]], bool] | None = None,
    **options: Any,
) -> AsyncIterator[World]:
    """A proxy with stub back-ends, all on free ports of loopback."""
    releases: list[dict[str, Any]] = []

    class Recorder:
        def release(self, kv_transfer_params: dict[str, Any], /) -> bool:
            releases.append(kv_transfer_params)
            return release(kv_transfer_params) if release else True

    async with AsyncExitStack() as stack:
        p = [Backend(offer()) for _ in range(prefills)]
        d = [Backend(answers) for _ in range(decodes)]
        for node in (*p, *d):
            await node.start()
            stack.push_async_callback(node.stop)
        urls = {"prefill": tuple(n.url for n in p), "decode": tuple(n.url for n in d)}
        settings = {"probe_interval": 0.02, "shutdown_timeout": 1.0, **urls, **options}
        runner = make_runner(ProxyOptions(**settings), Recorder())
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield World(p, d, url, client, releases, runner)
