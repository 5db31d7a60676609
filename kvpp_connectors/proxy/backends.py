"""HTTP calls of prefill and decode nodes: requests, answers, and their failures as errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from kvpp_connectors.proxy.call import Call
from kvpp_connectors.proxy.errors import BackendRejection, LegFailed
from kvpp_connectors.proxy.node import Node
from kvpp_connectors.proxy.options import ProxyOptions
from kvpp_connectors.proxy.sse import EventBuffer, begins_answer, is_done, split_at_error

__all__ = ["Backends", "PrefillAnswer", "StreamedAnswer", "WholeAnswer", "open_session"]

_EXCERPT = 300  # characters of a back-end's error body in ours
_FORWARDED = ("Content-Type", "Retry-After", "WWW-Authenticate")
_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """kv_transfer_params and finish reason of a prefill."""

    params: dict[str, Any] | None  # None: nothing to transfer
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A complete answer that is not streamed. Its body is never empty."""

    body: bytes
    headers: Mapping[str, str]


class StreamedAnswer:
    """A streamed answer, forwarded event by event; ``first`` holds its first events."""

    def __init__(self, node: Node, content: aiohttp.StreamReader, idle_timeout: float) -> None:
        self._node = node
        self._content = content
        self._idle_timeout = idle_timeout
        self._buffer = EventBuffer()
        self.first = b""

    async def begin(self) -> None:
        """Read until the answer has begun. Keep-alives and the role are held back until then.

        Raises:
            BackendRejection: the first event is an error with a 4xx code.
            LegFailed: any other error, or an end without an answer.
        """
        while True:
            chunk = await self._content.readany()
            events, error = split_at_error(self._buffer.feed(chunk))
            if error is not None:
                raise _early_error(self._node, error)
            self.first += events
            if begins_answer(events):
                return
            if not chunk or is_done(events):
                raise LegFailed(self._node, "the stream ended without an answer")

    async def rest(self) -> AsyncIterator[bytes]:
        """Whole events after the first ones, to the end of a complete answer.

        Raises:
            LegFailed: the stream broke, stalled, ended early or contained an error.
        """
        done = is_done(self.first)
        while chunk := await self._next(done):
            events, error = split_at_error(self._buffer.feed(chunk))
            done = done or is_done(events)
            if events:
                yield events
            if error is not None:
                raise LegFailed(self._node, f"an error in its stream: {error}", from_backend=error)
        if not done:
            raise LegFailed(self._node, "the stream ended before its answer did")

    async def _next(self, done: bool) -> bytes:
        """The next chunk, or nothing at the end of the stream.

        A complete answer is read to its end, too: a server whose connection closes early takes the
        request for an aborted one.
        """
        late = f"nothing for {self._idle_timeout:g} s in its stream"
        try:
            with _leg_failures(self._node, late):
                async with asyncio.timeout(self._idle_timeout):
                    return await self._content.readany()
        except LegFailed:
            if done:
                return b""
            raise


def open_session(options: ProxyOptions) -> aiohttp.ClientSession:
    """The client session of a proxy.

    Connections are not reused: a back-end that closes an idle one just then would look like a node
    that failed. Their number is not limited (aiohttp's default is 100).
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(
            total=None, connect=options.connect_timeout, sock_connect=options.connect_timeout
        ),
    )


class Backends:
    """Calls of back-ends. Each has a timeout, and closes its connection when it is cancelled."""

    def __init__(self, session: aiohttp.ClientSession, options: ProxyOptions) -> None:
        self._session = session
        self._options = options

    async def prefill(self, node: Node, call: Call, number: int) -> PrefillAnswer:
        """Run the prompt on ``node``; try ``number`` of this call.

        Raises:
            BackendRejection: a 4xx.
            LegFailed: anything else but an answer.
        """
        bound = self._options.prefill_timeout
        with _leg_failures(node, f"no answer within {bound:g} s"):
            async with (
                asyncio.timeout(bound),
                await self._post(node, call, call.prefill_body(), number) as response,
            ):
                await _check(node, response)
                return _read_prefill(node, await response.read())

    @asynccontextmanager
    async def decode(
        self, node: Node, call: Call, params: Mapping[str, Any] | None, number: int
    ) -> AsyncIterator[WholeAnswer | StreamedAnswer]:
        """Send the request to ``node``; the block begins once the answer's first bytes are there.

        Raises:
            BackendRejection: a 4xx.
            LegFailed: anything else but an answer. Never raised for errors inside the block.
        """
        streamed = call.body.get("stream") is True
        options = self._options
        bound = options.decode_first_byte_timeout if streamed else options.decode_timeout
        late = f"no {'first token' if streamed else 'answer'} in {bound:g} s"
        response: aiohttp.ClientResponse | None = None
        try:
            with _leg_failures(node, late):
                async with asyncio.timeout(bound):
                    response = await self._post(node, call, call.decode_body(params), number)
                    await _check(node, response)
                    answer = await self._open(node, response)
            yield answer
        finally:
            if response is not None:
                response.close()

    async def health(self, node: Node) -> None:
        """Probe ``node`` and mark it up, down or slow."""
        bound = self._options.probe_timeout
        try:
            async with (
                asyncio.timeout(bound),
                self._session.get(f"{node.url}/health", allow_redirects=False) as response,
            ):
                if response.status == 200:
                    node.mark_up()
                else:
                    node.mark_down(f"/health answered {response.status}")
        except _UNREACHABLE as error:
            node.mark_down(_describe(error))
        except TimeoutError:
            node.mark_slow(f"/health did not answer within {bound:g} s")
        except (aiohttp.ClientError, OSError) as error:
            node.mark_down(_describe(error))

    async def get(self, node: Node, path: str, headers: Mapping[str, str]) -> WholeAnswer:
        """GET ``path``, such as the list of models.

        Raises:
            BackendRejection: a 4xx.
            LegFailed: anything else but an answer.
        """
        bound = self._options.probe_timeout
        with _leg_failures(node, f"{path} did not answer within {bound:g} s"):
            async with (
                asyncio.timeout(bound),
                self._session.get(
                    node.url + path, headers=headers, allow_redirects=False
                ) as response,
            ):
                await _check(node, response)
                return await _read_whole(node, response)

    async def _post(
        self, node: Node, call: Call, body: bytes, number: int
    ) -> aiohttp.ClientResponse:
        """Send a request; retry once if the connection timed out.

        Nothing was sent then, and this process itself may have been short of processor time.
        """
        post = partial(
            self._session.post,
            node.url + call.path,
            data=body,
            headers=call.headers_of_try(number),
            allow_redirects=False,
        )
        try:
            return await post()
        except aiohttp.ConnectionTimeoutError:
            return await post()

    async def _open(
        self, node: Node, response: aiohttp.ClientResponse
    ) -> WholeAnswer | StreamedAnswer:
        if response.content_type != "text/event-stream":
            return await _read_whole(node, response)
        answer = StreamedAnswer(node, response.content, self._options.stream_idle_timeout)
        await answer.begin()
        return answer


async def _check(node: Node, response: aiohttp.ClientResponse) -> None:
    """Raise on a status other than 200: BackendRejection for 4xx, else LegFailed."""
    if response.status == 200:
        return
    body = await response.read()
    if 400 <= response.status < 500:
        raise BackendRejection(response.status, body, _forwarded(response))
    raise LegFailed(node, f"it answered {response.status} {_excerpt(body)}".rstrip())


async def _read_whole(node: Node, response: aiohttp.ClientResponse) -> WholeAnswer:
    body = await response.read()
    if not body.strip():
        raise LegFailed(node, "it answered 200 with an empty body")
    return WholeAnswer(body, _forwarded(response))


def _read_prefill(node: Node, body: bytes) -> PrefillAnswer:
    try:
        answer = json.loads(body)
        reason = answer["choices"][0].get("finish_reason")
        params = answer.get("kv_transfer_params")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise LegFailed(node, f"it answered 200 without a choice: {_excerpt(body)}") from error
    return PrefillAnswer(params if isinstance(params, dict) and params else None, reason)


def _early_error(node: Node, error: Mapping[str, Any]) -> BackendRejection | LegFailed:
    """An error event before any token. The client has no status yet, so it gets the error's."""
    code = error.get("code")
    if isinstance(code, int) and 400 <= code < 500:
        body = json.dumps({"error": error}).encode()
        return BackendRejection(code, body, {"Content-Type": "application/json"})
    return LegFailed(node, f"an error instead of an answer: {error.get('message', error)}")


@contextmanager
def _leg_failures(node: Node, late: str) -> Iterator[None]:
    """Turn errors of HTTP and the network into LegFailed, and have ``node`` probed at once."""
    try:
        yield
    except _UNREACHABLE as error:
        node.mark_down(_describe(error))
        node.probe_now.set()
        raise LegFailed(node, _describe(error)) from error
    except TimeoutError as error:
        node.probe_now.set()
        raise LegFailed(node, late, timed_out=True) from error
    except (aiohttp.ClientError, OSError) as error:
        node.probe_now.set()
        raise LegFailed(node, _describe(error)) from error


def _describe(error: Exception) -> str:
    return f"{error}" or type(error).__name__


def _excerpt(body: bytes) -> str:
    return body[:_EXCERPT].decode(errors="replace")


def _forwarded(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: response.headers[name] for name in _FORWARDED if name in response.headers}
