"""Traffic through a whole deployment: python -m tests.e2e [--requests N] [--concurrency N].

200 requests at concurrency 16 through the proxy, a quarter of them given up by their clients.

Prefill: two ranks with KVPP, P/D and pool children; decode: one rank; both are vLLM's own API
servers. Afterwards every answer is what decode computes alone, no block is held, and memory has
not grown.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import aiohttp
import psutil
from rich.console import Console

from kvpp_connectors.demo.children import ChildFailed
from kvpp_connectors.demo.servers import Fleet, fleet
from kvpp_connectors.demo.settings import ENVIRONMENT, Settings
from kvpp_connectors.demo.workload import ask, read_counters, send_wave, wait_idle
from tests.engine import tiny_models
from tests.engine.harness import VOCABULARY, random_tokens

TOKENS = 12
ABORTED = 0.25
GROWTH = 64 << 20  # bytes, over five processes: allocators keep some of what they gave back
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}  # for /reset_prefix_cache


def prompts(count: int) -> list[list[int]]:
    """Random lengths; a third of them go on from one of four beginnings."""
    numbers = random.Random(7)
    beginnings = [random_tokens(seed, 64) for seed in range(4)]
    return [
        [
            *(numbers.choice(beginnings) if numbers.random() < 1 / 3 else ()),
            *random_tokens(100 + n, numbers.randrange(8, 200)),
        ]
        for n in range(count)
    ]


async def expected_answers(decode: str, asked: list[list[int]], at_once: int) -> list[list[int]]:
    """What decode computes alone, some at a time; its prefix cache is empty again afterwards."""
    answers = []
    for start in range(0, len(asked), at_once):
        answers += await send_wave(decode, asked[start : start + at_once], TOKENS)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{decode}/reset_prefix_cache") as answer,
    ):
        assert answer.status == 200
    return [answer.tokens for answer in answers]


async def run_traffic(
    url: str, asked: list[list[int]], right: list[list[int]], concurrency: int
) -> Counter[str]:
    """Send everything; count answers that are right, wrong, and given up."""
    numbers, turns = random.Random(11), asyncio.Semaphore(concurrency)
    fates = [numbers.random() * 2.0 if numbers.random() < ABORTED else None for _ in asked]
    counts: Counter[str] = Counter()

    async def one(session: aiohttp.ClientSession, n: int) -> None:
        async with turns:
            try:
                answer = await asyncio.wait_for(ask(session, asked[n], TOKENS), fates[n])
            except TimeoutError:
                counts["given up"] += 1
            except ChildFailed as error:
                counts["error"] += 1
                print(error)
            else:
                counts["right" if answer.tokens == right[n] else "wrong"] += 1

    connector = aiohttp.TCPConnector(limit=2 * concurrency)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        await asyncio.gather(*(one(session, n) for n in range(len(asked))))
    return counts


def resident_bytes() -> int:
    """Memory of the engines and the proxy; the pool's store is there to fill up."""
    children = psutil.Process().children(recursive=True)
    return sum(c.memory_info().rss for c in children if c.name() != "mooncake_client")


async def check_traffic(servers: Fleet, count: int, concurrency: int) -> bool:
    """Run it in two halves, so that memory is compared warm; print what came of it."""
    asked = prompts(count)
    right = await expected_answers(servers.decode, asked, concurrency)
    half, counts, grown = count // 2, Counter[str](), 0
    held = []
    for part in (slice(0, half), slice(half, count)):
        grown = -resident_bytes()
        counts += await run_traffic(servers.proxy, asked[part], right[part], concurrency)
        held += [await wait_idle(servers.prefill), await wait_idle(servers.decode)]
        grown += resident_bytes()
    decode = await read_counters(servers.decode)
    pulls, failed = (decode[f"vllm:kvpp_p2p_pull{name}_total"] for name in ("s", "_failures"))
    print(f"{dict(counts)}; {pulls:.0f} pulls, {failed:.0f} failed (of requests given up)")
    print(f"shares of blocks held after each half, prefill and decode: {held}")
    print(f"memory of engines and proxy grew by {grown:,} bytes in the second half")
    return not (counts["wrong"] or counts["error"] or any(held)) and grown < GROWTH


def main() -> int:
    """1 if an answer is wrong, a request failed, a block is held, or memory grew."""
    parser = argparse.ArgumentParser(prog="make traffic", description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvpp-traffic-"))
    settings = Settings(
        folder=folder,
        console=Console(),
        vocabulary=VOCABULARY,
        tensor_parallel_size=2,
        memory=64 << 20,
        max_num_batched_tokens=128,
        max_model_len=512,
        environment=ENVIRONMENT | DEV_MODE,
    )
    tiny_models.write(settings.model, tiny_models.MLA)
    print(f"logs: {folder}")
    with fleet(settings) as servers:
        good = asyncio.run(check_traffic(servers, options.requests, options.concurrency))
    print("good" if good else "WRONG")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
