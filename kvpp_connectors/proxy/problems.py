"""What goes wrong with a request, and how the client is told: in OpenAI's shape of an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from kvpp_connectors.proxy.nodes import Leg, Node

__all__ = ["Invalid", "LegFailed", "NoNode", "Outcome", "Problem", "Refused", "error_object"]


class Outcome(StrEnum):
    """How a request ended, as the metrics and the log call it."""

    OK = "ok"
    INVALID = "invalid"  # refused by the proxy: no JSON, too large
    REFUSED = "refused"  # a back-end's 4xx
    UNAVAILABLE = "unavailable"  # no node in rotation
    FAILED = "failed"  # every try failed; nothing was sent
    CUT = "cut"  # failed after the first chunk
    CLIENT_GONE = "client_gone"
    INTERNAL = "internal"  # a bug in the proxy


def error_object(message: str, kind: str, code: int, **more: object) -> dict[str, Any]:
    """The value of ``error`` in OpenAI's and vLLM's error answers."""
    return {"message": message, "type": kind, "param": None, "code": code, **more}


class Problem(Exception):
    """A request that ends with an error answer, before anything was sent to the client."""

    outcome: Outcome

    def response(self) -> web.Response:
        """The answer to the client."""
        raise NotImplementedError


class Invalid(Problem):
    """The proxy itself does not take the request."""

    outcome = Outcome.INVALID

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def response(self) -> web.Response:
        """A 4xx with the reason."""
        error = error_object(str(self), "BadRequestError", self.status)
        return web.json_response({"error": error}, status=self.status)


@dataclass(eq=False)
class Refused(Problem):
    """A back-end's 4xx: forwarded as it is, never retried."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    outcome = Outcome.REFUSED

    def response(self) -> web.Response:
        """The back-end's own status and body."""
        return web.Response(status=self.status, body=self.body, headers=self.headers)


class NoNode(Problem):
    """No node of a leg is in rotation."""

    outcome = Outcome.UNAVAILABLE

    def __init__(self, leg: Leg) -> None:
        super().__init__(f"no {leg} node is up")
        self.leg = leg

    def response(self) -> web.Response:
        """503: nothing was tried."""
        error = error_object(str(self), "ServiceUnavailableError", 503, leg=self.leg)
        return web.json_response({"error": error}, status=503, headers={"Retry-After": "5"})


class LegFailed(Problem):
    """A leg failed in a way that another try may mend.

    Args:
        node: where.
        what: what happened there.
        timed_out: a bound was reached.
        shown: the error that the back-end itself put into its stream, for the client.
    """

    outcome = Outcome.FAILED

    def __init__(
        self,
        node: Node,
        what: str,
        *,
        timed_out: bool = False,
        shown: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{node.leg} on {node.url} failed: {what}")
        self.node = node
        self.tries = 1
        self.shown = shown
        self._status = 504 if timed_out else 502

    def error(self) -> dict[str, Any]:
        """The error object: which leg, which node, what happened."""
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
