"""A client's request, and the bodies and headers sent to the two legs for it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpp_connectors.proxy.errors import InvalidRequest

__all__ = ["Call", "read_call"]

_ID = "X-Request-Id"
# The client's headers that back-ends receive. Not X-data-parallel-rank: the legs' ranks differ.
_PASSED = ("Authorization", "traceparent", "tracestate", "X-Session-ID", "X-Vllm-Priority")
_REQUEST_WORK = 1024  # fixed cost of a request, in bytes of body

# Tells prefill's connector that another engine decodes; the connector fills in the rest.
_PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request, parsed. ``work``: its load on a node, in bytes of body."""

    path: str
    request_id: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    work: int

    @property
    def without_transfer(self) -> str | None:
        """Why decode has to run the prompt itself, or None if prefill can do it.

        A transfer belongs to one sequence and is read once; logprobs of the prompt's tokens need
        its forward pass.
        """
        if self.body.get("n") not in (None, 1) or self.body.get("use_beam_search"):
            return "several_sequences"
        if _prompts(self.body) > 1:
            return "several_prompts"
        scores = self.body.get("logprobs") or self.body.get("top_logprobs")
        if self.body.get("prompt_logprobs") is not None or (self.body.get("echo") and scores):
            return "prompt_scores"
        return None

    def prefill_body(self) -> bytes:
        """The body for prefill: one token, not streamed, with the request for a transfer."""
        body = {**self.body, "stream": False, "max_tokens": 1, "min_tokens": 1}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        body.pop("stream_options", None)
        return json.dumps({**body, "kv_transfer_params": _PREFILL_PARAMS}).encode()

    def decode_body(self, params: Mapping[str, Any] | None) -> bytes:
        """The client's body with prefill's kv_transfer_params, verbatim, or without any."""
        body = dict(self.body)
        if params is not None:
            body["kv_transfer_params"] = params
        return json.dumps(body).encode()

    def headers_of_try(self, number: int) -> dict[str, str]:
        """Headers for a back-end. Each retry has its own id: the first try may still be running."""
        mark = f".{number}" if number > 1 else ""
        return {**self.headers, _ID: self.request_id + mark}


def read_call(path: str, headers: Mapping[str, str], raw: bytes) -> Call:
    """Parse a client's request.

    The client's own kv_transfer_params are dropped: they could make an engine connect anywhere.

    Raises:
        InvalidRequest: the body is not a JSON object.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest(400, f"the body must be a JSON object, not {type(body).__name__}")
    body.pop("kv_transfer_params", None)
    chosen = headers.get(_ID) or body.pop("request_id", None)
    body.pop("request_id", None)
    return Call(
        path=path,
        request_id=_unique_id(chosen),
        body=body,
        headers={
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            **{name: headers[name] for name in _PASSED if name in headers},
        },
        work=_REQUEST_WORK + len(raw),
    )


def _unique_id(chosen: object) -> str:
    """The client's id, made unique: two live requests may come with the same one."""
    unique = uuid.uuid4().hex
    if not isinstance(chosen, str) or not chosen:
        return unique
    return f"{re.sub(r'[^A-Za-z0-9._:-]', '_', chosen)[:128]}-{unique[:16]}"


def _prompts(body: Mapping[str, Any]) -> int:
    """How many prompts a completion request holds; a list of token ids is one."""
    count = 0
    for name in ("prompt", "prompt_embeds"):
        value = body.get(name)
        if isinstance(value, list) and not all(type(item) is int for item in value):
            count += len(value)
        elif value is not None:
            count += 1
    return count
