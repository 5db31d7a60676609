"""One request of a client, and the bodies that the two legs get of it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpp_connectors.proxy.problems import Invalid

__all__ = ["Call", "read_call"]

_ID = "X-Request-Id"
# What a back-end is told of the client's headers. X-data-parallel-rank is not among them: the two
# legs have ranks of their own.
_PASSED = ("Authorization", "traceparent", "tracestate", "X-Session-ID", "X-Vllm-Priority")
_REQUEST_WORK = 1024  # what a request costs beside its length, in bytes of body

# What tells a connector that another engine will decode; it fills in the rest.
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
    """A request of a client, parsed. ``work`` is what it weighs in the choice of a node."""

    path: str
    request_id: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    work: int

    @property
    def without_transfer(self) -> str | None:
        """Why decode has to run the prompt itself, or None if prefill can do it.

        Transfer data belongs to one sequence and is read once. Scores of the prompt's tokens are
        made by running it.
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
        """The body for prefill: one token, no stream, and the wish for transfer data."""
        body = {**self.body, "stream": False, "max_tokens": 1, "min_tokens": 1}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        body.pop("stream_options", None)
        return json.dumps({**body, "kv_transfer_params": _PREFILL_PARAMS}).encode()

    def decode_body(self, params: Mapping[str, Any] | None) -> bytes:
        """The client's body with prefill's transfer data, verbatim, or with none."""
        body = dict(self.body)
        if params is not None:
            body["kv_transfer_params"] = params
        return json.dumps(body).encode()

    def headers_of_try(self, number: int) -> dict[str, str]:
        """Headers for a back-end. A further try has an id of its own: the first may still live."""
        mark = f".{number}" if number > 1 else ""
        return {**self.headers, _ID: self.request_id + mark}


def read_call(path: str, headers: Mapping[str, str], raw: bytes) -> Call:
    """Parse a client's request.

    Transfer data of the client's own is dropped: it would make an engine connect to any address.

    Raises:
        Invalid: the body is no JSON object.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Invalid(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Invalid(400, f"the body must be a JSON object, not {type(body).__name__}")
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
