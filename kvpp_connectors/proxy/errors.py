"""How a request can fail, and the answers to the client: OpenAI's error objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from aiohttp import web

from kvpp_connectors.proxy.node import Leg, Node

__all__ = [
    "BackendRejection",
    "InvalidRequest",
    "LegFailed",
    "NoNode",
    "RequestError",
    "RequestOutcome",
    "error_object",
]


class RequestOutcome(StrEnum):
    """How a request ended, as the metrics and the log call it."""

    OK = "ok"
    INVALID = "invalid"  # refused by the proxy: no JSON, too large
    REFUSED = "refused"  # a back-end's 4xx
    UNAVAILABLE = "unavailable"  # no node of a leg in rotation
    FAILED = "failed"  # every try failed; nothing was sent
    CUT = "cut"  # failed after the first chunk
    CLIENT_GONE = "client_gone"
    INTERNAL = "internal"  # a bug in the proxy


def error_object(message: str, kind: str, code: int, **more: object) -> dict[str, Any]:
    """The value of ``error`` in OpenAI's and vLLM's error answers."""
    return {"message": message, "type": kind, "param": None, "code": code, **more}


class RequestError(Exception):
    """A request that ends with an error answer; nothing of an answer was sent to the client."""

    outcome: RequestOutcome

    def response(self) -> web.Response:
        """The answer to the client."""
        raise NotImplementedError


class InvalidRequest(RequestError):
    """The proxy itself rejects the request."""

    outcome = RequestOutcome.INVALID

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def response(self) -> web.Response:
        """A 4xx with the reason."""
        error = error_object(str(self), "BadRequestError", self.status)
        return web.json_response({"error": error}, status=self.status)


@dataclass(eq=False)
class BackendRejection(RequestError):
    """A back-end's 4xx: forwarded as it is, never retried."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    outcome = RequestOutcome.REFUSED

    def response(self) -> web.Response:
        """The back-end's own status and body."""
        return web.Response(status=self.status, body=self.body, headers=self.headers)


class NoNode(RequestError):
    """No node of a leg is in rotation."""

    outcome = RequestOutcome.UNAVAILABLE

    def __init__(self, leg: Leg) -> None:
        super().__init__(f"no {leg} node is up")
        self.leg = leg

    def response(self) -> web.Response:
        """503."""
        error = error_object(str(self), "ServiceUnavailableError", 503, leg=self.leg)
        return web.json_response({"error": error}, status=503, headers={"Retry-After": "5"})


class LegFailed(RequestError):
    """A leg failed; another try may succeed.

    Args:
        node: where.
        what: what happened there.
        timed_out: a timeout expired.
        from_backend: the error object that the back-end sent in its stream; forwarded as it is.
    """

    outcome = RequestOutcome.FAILED

    def __init__(
        self,
        node: Node,
        what: str,
        *,
        timed_out: bool = False,
        from_backend: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{node.leg} on {node.url} failed: {what}")
        self.node = node
        self.tries = 1
        self.from_backend = from_backend
        self._status = 504 if timed_out else 502

    def error(self) -> dict[str, Any]:
        """The error object, with leg and node."""
        return error_object(
            f"{self} (try {self.tries})" if self.tries > 1 else str(self),
            "GatewayTimeoutError" if self._status == 504 else "BadGatewayError",
            self._status,
            leg=self.node.leg,
            node=self.node.url,
        )

    def response(self) -> web.Response:
        """502, or 504 after a timeout."""
        return web.json_response({"error": self.error()}, status=self._status)
