"""A request from its arrival to the last byte of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from kvpp_connectors.log import get_logger
from kvpp_connectors.proxy.backends import Backends, StreamedAnswer, WholeAnswer
from kvpp_connectors.proxy.call import Call, read_call
from kvpp_connectors.proxy.errors import (
    BackendRejection,
    InvalidRequest,
    LegFailed,
    NoNode,
    RequestError,
    RequestOutcome,
)
from kvpp_connectors.proxy.metrics import Metrics
from kvpp_connectors.proxy.node import Node
from kvpp_connectors.proxy.node_pool import NodePool
from kvpp_connectors.proxy.options import ProxyOptions
from kvpp_connectors.proxy.releases import PrefillTransfer, ReleaseRunner
from kvpp_connectors.proxy.sse import error_event

__all__ = ["Service"]

_LOG = get_logger(__name__)
_NO_ID = "-"  # of a request that could not be read


@dataclass(slots=True)
class _Record:
    """A request for its log line and the metrics. Times in seconds."""

    request_id: str = _NO_ID
    prefill: Node | None = None
    decode: Node | None = None
    prefill_s: float | None = None
    first_byte_s: float | None = None
    status: int = 0  # 0: none was sent
    outcome: RequestOutcome = RequestOutcome.INTERNAL
    tries: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the request arrived."""
        return time.monotonic() - self.started


class _ClientGone(Exception):
    """The client has closed its connection, or does not read any more."""


class Service:
    """Answers clients' requests: prefill on one node, decode on another."""

    def __init__(
        self,
        options: ProxyOptions,
        prefill: NodePool,
        decode: NodePool,
        backends: Backends,
        releases: ReleaseRunner,
        metrics: Metrics,
    ) -> None:
        self._options = options
        self._prefill_pool = prefill
        self._decode_pool = decode
        self._backends = backends
        self._releases = releases
        self._metrics = metrics

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion request. The task is cancelled when the client goes away."""
        record = _Record()
        try:
            call = await self._receive(request)
            record.request_id = call.request_id
            return await self._serve(call, request, record)
        except RequestError as problem:
            response = problem.response()
            if record.request_id != _NO_ID:
                response.headers["X-Request-Id"] = record.request_id
            record.outcome, record.status = problem.outcome, response.status
            return response
        except asyncio.CancelledError:
            record.outcome = RequestOutcome.CLIENT_GONE
            raise
        except _ClientGone:
            record.outcome = RequestOutcome.CLIENT_GONE
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        finally:
            self._report(record)

    async def models(self, request: web.Request) -> web.Response:
        """The list of models, from the first decode node that answers."""
        headers = {k: v for k, v in request.headers.items() if k == "Authorization"}
        problem: RequestError = NoNode(self._decode_pool.leg)
        for node in self._decode_pool.healthy:
            try:
                answer = await self._backends.get(node, request.path, headers)
                return web.Response(body=answer.body, headers=answer.headers)
            except LegFailed as error:
                problem = error
            except BackendRejection as error:
                return error.response()
        return problem.response()

    async def _receive(self, request: web.Request) -> Call:
        bound = self._options.client_timeout
        try:
            async with asyncio.timeout(bound):
                raw = await request.read()
        except TimeoutError as error:
            raise InvalidRequest(408, f"the body did not arrive within {bound:g} s") from error
        except web.HTTPRequestEntityTooLarge as error:
            limit = self._options.max_body_bytes
            raise InvalidRequest(413, f"the body is larger than {limit} bytes") from error
        except web.RequestPayloadError as error:
            raise InvalidRequest(400, f"the body cannot be read: {error}") from error
        except ConnectionError as error:
            raise _ClientGone from error
        return read_call(request.path, request.headers, raw)

    async def _serve(self, call: Call, request: web.Request, record: _Record) -> web.StreamResponse:
        """Try until an answer has begun. Each try has its own prefill: a transfer is read once."""
        failed: dict[Node, LegFailed] = {}
        failure: LegFailed | None = None
        for number in range(1, self._options.retries + 2):
            record.tries = number
            try:
                return await self._try(call, request, record, failed)
            except NoNode:
                if failure is None:
                    raise
                break
            except LegFailed as error:
                failure = failed[error.node] = error
                error.tries = number
                _LOG.warning("request %s: try %d: %s", call.request_id, number, error)
                if number <= self._options.retries:
                    self._metrics.retries.labels(error.node.leg).inc()
        assert failure is not None
        raise failure

    async def _try(
        self, call: Call, request: web.Request, record: _Record, failed: dict[Node, LegFailed]
    ) -> web.StreamResponse:
        self._decode_pool.require()  # before a prefill is run in vain
        async with self._prefilled(call, record, failed) as transfer:
            with self._decode_pool.assigned(call.work, failed) as node:
                record.decode = node
                async with self._backends.decode(
                    node, call, transfer.params, record.tries
                ) as answer:
                    record.first_byte_s = record.seconds
                    response = await self._forward(request, answer, record)
            transfer.used = record.outcome is RequestOutcome.OK
            return response

    @asynccontextmanager
    async def _prefilled(
        self, call: Call, record: _Record, failed: dict[Node, LegFailed]
    ) -> AsyncIterator[PrefillTransfer]:
        """Run prefill; release its transfer at the end unless used. Empty: decode recomputes."""
        params = None
        reason = call.without_transfer
        if reason is None:
            started = time.monotonic()
            with self._prefill_pool.assigned(call.work, failed) as node:
                record.prefill = node
                answer = await self._backends.prefill(node, call, record.tries)
            record.prefill_s = time.monotonic() - started
            params = answer.params
            if answer.finish_reason == "abort":
                reason = "aborted"
            elif params is None or not params.get("do_remote_prefill"):
                reason = "not_offered"
        if reason is not None:
            self._count_recompute(call, record, reason)
            if params is not None:
                self._releases.release(params, call.request_id)
            params = None
        with self._releases.held(params, call.request_id) as transfer:
            yield transfer

    def _count_recompute(self, call: Call, record: _Record, reason: str) -> None:
        self._metrics.recomputes.labels(reason).inc()
        if record.prefill_s is not None:
            _LOG.warning(
                "request %s: prefill on %s gave no transfer (%s); decode runs the prompt itself",
                call.request_id,
                record.prefill,
                reason,
            )

    async def _forward(
        self, request: web.Request, answer: WholeAnswer | StreamedAnswer, record: _Record
    ) -> web.StreamResponse:
        """Send an answer that has begun. From here on nothing is retried."""
        own = {"X-Request-Id": record.request_id}
        record.status = 200
        if isinstance(answer, WholeAnswer):
            record.outcome = RequestOutcome.OK
            return web.Response(body=answer.body, headers={**answer.headers, **own})
        stream = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers={**stream, **own})
        await self._to_client(response.prepare(request))
        await self._to_client(response.write(answer.first))
        try:
            async for events in answer.rest():
                await self._to_client(response.write(events))
            record.outcome = RequestOutcome.OK
        except LegFailed as cut:
            record.outcome = RequestOutcome.CUT
            _LOG.warning("request %s: its stream was cut: %s", record.request_id, cut)
            await self._to_client(response.write(error_event(cut.from_backend or cut.error())))
        await self._to_client(response.write_eof())
        return response

    async def _to_client(self, sending: Awaitable[object]) -> None:
        """Await ``sending``.

        Raises:
            _ClientGone: the client has gone, or took nothing for client_timeout.
        """
        try:
            async with asyncio.timeout(self._options.client_timeout):
                await sending
        except (TimeoutError, ConnectionError) as error:
            raise _ClientGone from error

    def _report(self, record: _Record) -> None:
        metrics = self._metrics
        metrics.requests.labels(record.outcome).inc()
        metrics.request_seconds.observe(record.seconds)
        if record.prefill_s is not None:
            metrics.prefill_seconds.observe(record.prefill_s)
        if record.first_byte_s is not None:
            metrics.first_byte_seconds.observe(record.first_byte_s)
        _LOG.info(
            "request %s: prefill %s %s, decode %s, first byte %s, %.3f s, tries %d, status %s, %s",
            record.request_id,
            record.prefill or "-",
            _seconds(record.prefill_s),
            record.decode or "-",
            _seconds(record.first_byte_s),
            record.seconds,
            record.tries,
            record.status or "-",
            record.outcome,
        )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
