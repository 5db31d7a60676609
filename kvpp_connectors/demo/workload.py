"""The demo's clients: streamed completions sent together, and the servers' metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvpp_connectors.demo.children import ChildFailed

__all__ = [
    "EXTERNAL_HITS",
    "LOCAL_HITS",
    "Completion",
    "ask",
    "read_counters",
    "read_pool_bytes",
    "read_samples",
    "send_wave",
    "wait_idle",
    "warm_up",
]

_ANSWER_S = 300.0  # for a whole answer on a busy machine
_IDLE_S = 60.0  # for blocks to be freed
_PROBE_S = 0.25
_SHORT = 15  # tokens: less than a block
_USAGE = "vllm:kv_cache_usage_perc"
LOCAL_HITS = "vllm:prefix_cache_hits_total"  # tokens, in the engine's own prefix cache
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"  # tokens, by KV connectors


@dataclass(frozen=True, slots=True)
class Completion:
    """Token ids of an answer, and the seconds until the first of them."""

    tokens: list[int]
    first_token_s: float


async def send_wave(url: str, prompts: Sequence[list[int]], max_tokens: int) -> list[Completion]:
    """Send all prompts at once; their answers in order.

    Raises:
        ChildFailed: a request was refused or its stream broke.
    """
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        return await asyncio.gather(*(ask(session, prompt, max_tokens) for prompt in prompts))


async def warm_up(url: str, most: int) -> None:
    """Have an engine run steps of 2 to ``most`` tokens, as far as it batches prompts.

    oneDNN caches a kernel per matrix product and number of tokens, so a rank of any vLLM engine on
    CPU grows by some 300 MB until it has seen them all. The prompts are too short to fill a block:
    nothing is cached, saved or loaded.

    Raises:
        ChildFailed: a request was refused.
    """
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        for tokens in range(2, most + 1):
            lengths = [_SHORT] * (tokens // _SHORT) + [tokens % _SHORT]
            prompts = [[1] * length for length in lengths if length]
            body = {"model": "demo", "prompt": prompts, "max_tokens": 1}
            async with session.post("/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise ChildFailed(f"a warm-up: HTTP {answer.status}: {await answer.text()}")


async def ask(session: aiohttp.ClientSession, prompt: list[int], max_tokens: int) -> Completion:
    """Stream one completion of the session's server.

    Raises:
        ChildFailed: the request was refused or its stream broke.
    """
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    started, first, tokens = time.perf_counter(), None, []
    async with session.post("/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise ChildFailed(f"a completion: HTTP {answer.status}: {await answer.text()}")
        async for line in answer.content:
            chunk = _event(line)
            if chunk and first is None:
                first = time.perf_counter() - started
            tokens += chunk
    if first is None:
        raise ChildFailed("a completion ended without a token; see the logs of the servers")
    return Completion(tokens, first)


async def read_samples(url: str) -> list[Sample]:
    """All samples of the server's /metrics."""
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"{url}/metrics") as answer,
    ):
        text = await answer.text()
    families = text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples]


async def read_counters(url: str) -> Counter[str]:
    """The server's metrics by name, summed over their labels."""
    counters: Counter[str] = Counter()
    for sample in await read_samples(url):
        counters[sample.name] += sample.value  # type: ignore[assignment]
    return counters


async def read_pool_bytes(url: str) -> Counter[str]:
    """Bytes that the server has saved to the pool (``put``) and loaded from it (``get``)."""
    return Counter(
        {
            sample.labels["what"]: int(sample.value)
            for sample in await read_samples(url)
            if sample.name == "vllm:kvpp_pool_bytes_total"
        }
    )


async def wait_idle(url: str) -> float:
    """Wait until no request holds a block; the share still held: 0 unless the timeout expired."""
    deadline = time.monotonic() + _IDLE_S
    while usage := (await read_counters(url))[_USAGE]:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(_PROBE_S)
    return usage


def _event(line: bytes) -> list[int]:
    """Token ids in one line of a stream.

    Raises:
        ChildFailed: the line is an error.
    """
    payload = line.strip().removeprefix(b"data:").strip()
    if not payload or payload == b"[DONE]":
        return []
    event = json.loads(payload)
    if "error" in event:
        raise ChildFailed(f"a completion failed: {event['error']}")
    tokens: list[int] = event["choices"][0].get("token_ids") or []
    return tokens
