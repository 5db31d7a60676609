"""The proxy as a server: routes, background work, start and graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvpp_connectors.log import get_logger
from kvpp_connectors.proxy.backends import Backends, open_session
from kvpp_connectors.proxy.errors import error_object
from kvpp_connectors.proxy.metrics import Metrics
from kvpp_connectors.proxy.node import Leg
from kvpp_connectors.proxy.node_pool import NodePool
from kvpp_connectors.proxy.options import ProxyOptions
from kvpp_connectors.proxy.probes import Prober
from kvpp_connectors.proxy.releases import NoReleaser, Releaser, ReleaseRunner
from kvpp_connectors.proxy.service import Service

__all__ = ["make_runner", "serve"]

_LOG = get_logger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_runner(options: ProxyOptions, releaser: Releaser | None = None) -> web.AppRunner:
    """The proxy's application, to be bound to an address.

    ``releaser`` releases transfers that no decode node reads; without one, prefill keeps their
    blocks until the lease expires.
    """
    app = web.Application(client_max_size=options.max_body_bytes, middlewares=[_openai_errors])
    _Proxy(options, releaser or NoReleaser()).add_to(app)
    return web.AppRunner(
        app,
        handler_cancellation=True,  # a client that goes away cancels its request
        shutdown_timeout=options.shutdown_timeout,
        access_log=None,  # Service logs one line per request
    )


async def serve(
    options: ProxyOptions, host: str, port: int, releaser: Releaser | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then finish running requests. A second signal kills.

    Raises:
        OSError: the address cannot be bound.
    """
    runner = make_runner(options, releaser)
    stop = asyncio.Event()
    try:
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        for bound in runner.addresses:
            _LOG.info("listening on %s port %d", *bound[:2])
        async with _signals(stop):
            await stop.wait()
        _LOG.info("stopping; running requests have %g s to end", options.shutdown_timeout)
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _signals(stop: asyncio.Event) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class _Proxy:
    """Builds the service and runs its background work for the life of the server."""

    def __init__(self, options: ProxyOptions, releaser: Releaser) -> None:
        self._options = options
        self._releaser = releaser
        self._pools = (
            NodePool(Leg.PREFILL, options.prefill),
            NodePool(Leg.DECODE, options.decode),
        )
        self._nodes = [node for pool in self._pools for node in pool.nodes]
        self._metrics = Metrics(self._nodes)
        self._service: Service

    def add_to(self, app: web.Application) -> None:
        """Register routes and background work."""
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, lambda request: self._service.generate(request))
        app.router.add_get("/v1/models", lambda request: self._service.models(request))
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_page)
        app.cleanup_ctx.append(self._run)

    async def _run(self, app: web.Application) -> AsyncIterator[None]:
        """Start and stop what the server needs. aiohttp resumes it after the running requests."""
        del app
        options = self._options
        async with open_session(options) as session:
            backends = Backends(session, options)
            metrics = self._metrics
            releases = ReleaseRunner(self._releaser, options.release_timeout, metrics.releases)
            prober = Prober(self._nodes, backends.health, options.probe_interval)
            self._service = Service(options, *self._pools, backends, releases, metrics)
            await prober.start()
            yield
            await prober.close()
            await releases.close()

    async def _health(self, request: web.Request) -> web.Response:
        """200 if both legs have a node in rotation, else 503; the body names all nodes."""
        del request
        nodes = {pool.leg: {n.url: n.healthy for n in pool.nodes} for pool in self._pools}
        ready = all(pool.healthy for pool in self._pools)
        return web.json_response(nodes, status=200 if ready else 503)

    async def _metrics_page(self, request: web.Request) -> web.Response:
        del request
        page = generate_latest(self._metrics.registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})


@web.middleware
async def _openai_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer aiohttp's own errors (no such path or method) with OpenAI's error object."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        body = error_object(
            f"{request.method} {request.path}: {error.reason}", "HTTPError", error.status
        )
        return web.json_response({"error": body}, status=error.status)
