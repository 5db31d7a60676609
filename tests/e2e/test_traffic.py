"""200 requests at concurrency 16 through the proxy, a quarter of them given up by their clients.

Prefill: two ranks with KVPP, P/D and pool children; decode: one rank; both are vLLM's own API
servers. Afterwards every answer is what decode computes alone, no block is held, and memory has
not grown.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from io import StringIO

import aiohttp
import psutil
import pytest
from rich.console import Console

from kvpp_connectors.demo.servers import Fleet, FleetSettings, fleet
from kvpp_connectors.demo.settings import ENVIRONMENT
from kvpp_connectors.demo.workload import ask, read_counters, send_wave, wait_idle
from tests.engine import tiny_models
from tests.engine.harness import random_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

REQUESTS, CONCURRENCY, TOKENS = 200, 16, 12
ABORTED = 0.25
GROWTH = 64 << 20  # bytes, over five processes: allocators keep some of what they gave back
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Prefill, decode and the proxy."""
    folder = tmp_path_factory.mktemp("traffic")
    settings = FleetSettings(
        model=tiny_models.write(folder / "model", tiny_models.MLA),
        tensor_parallel_size=2,
        kv_cache_memory_bytes=64 << 20,
        max_num_batched_tokens=128,
        max_model_len=512,
        logs=folder,
        environment=ENVIRONMENT | DEV_MODE,
    )
    with fleet(settings, Console(file=StringIO())) as running:
        yield running


def prompts() -> list[list[int]]:
    """Random lengths; a third of them go on from one of four beginnings."""
    numbers = random.Random(7)
    beginnings = [random_tokens(seed, 64) for seed in range(4)]
    return [
        [
            *(numbers.choice(beginnings) if numbers.random() < 1 / 3 else ()),
            *random_tokens(100 + n, numbers.randrange(8, 200)),
        ]
        for n in range(REQUESTS)
    ]


async def expected_answers(decode: str, asked: list[list[int]]) -> list[list[int]]:
    """What decode computes alone, sixteen at a time; its prefix cache is empty again afterwards."""
    answers = []
    for start in range(0, len(asked), CONCURRENCY):
        answers += await send_wave(decode, asked[start : start + CONCURRENCY], TOKENS)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{decode}/reset_prefix_cache") as answer,
    ):
        assert answer.status == 200
    return [answer.tokens for answer in answers]


async def run_traffic(url: str, asked: list[list[int]], right: list[list[int]]) -> Counter[str]:
    """Send everything; count answers that are right, wrong, and given up."""
    numbers, turns = random.Random(11), asyncio.Semaphore(CONCURRENCY)
    fates = [numbers.random() * 2.0 if numbers.random() < ABORTED else None for _ in asked]
    counts: Counter[str] = Counter()

    async def one(session: aiohttp.ClientSession, n: int) -> None:
        async with turns:
            try:
                answer = await asyncio.wait_for(ask(session, asked[n], TOKENS), fates[n])
            except TimeoutError:
                counts["given up"] += 1
            else:
                counts["right" if answer.tokens == right[n] else "wrong"] += 1

    connector = aiohttp.TCPConnector(limit=2 * CONCURRENCY)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        await asyncio.gather(*(one(session, n) for n in range(len(asked))))
    return counts


def resident_bytes() -> int:
    """Memory of the engines and the proxy; the pool's store is there to fill up."""
    children = psutil.Process().children(recursive=True)
    return sum(c.memory_info().rss for c in children if c.name() != "mooncake_client")


def test_traffic_with_aborts(servers: Fleet) -> None:
    asyncio.run(check_traffic(servers))


async def check_traffic(servers: Fleet) -> None:
    """The whole of the test."""
    asked = prompts()
    right = await expected_answers(servers.decode, asked)
    half = REQUESTS // 2
    counts = await run_traffic(servers.proxy, asked[:half], right[:half])
    assert not any([await wait_idle(servers.prefill), await wait_idle(servers.decode)])
    warm = resident_bytes()
    counts += await run_traffic(servers.proxy, asked[half:], right[half:])
    assert not any([await wait_idle(servers.prefill), await wait_idle(servers.decode)])
    growth = resident_bytes() - warm
    decode = await read_counters(servers.decode)
    print(counts, f"growth {growth:,} bytes, {decode['vllm:kvpp_p2p_pulls_total']:.0f} pulls")
    assert not counts["wrong"]
    assert counts["right"] + counts["given up"] == REQUESTS
    assert counts["right"] >= REQUESTS / 2
    assert decode["vllm:kvpp_p2p_pulls_total"] >= counts["right"]  # nothing was computed instead
    assert not decode["vllm:kvpp_p2p_pull_failures_total"]
    assert growth < GROWTH
