"""The whole deployment under a workload in two waves: the second table of the demo.

Prefill is restarted in between, so that the second wave hits the pool and not prefill's own prefix
cache.
"""

from __future__ import annotations

import ast
import asyncio
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvpp_connectors.demo.children import ChildFailed
from kvpp_connectors.demo.engine import EngineResult
from kvpp_connectors.demo.report import Row
from kvpp_connectors.demo.servers import Fleet, fleet
from kvpp_connectors.demo.settings import DemoSettings
from kvpp_connectors.demo.workload import (
    EXTERNAL_HITS,
    LOCAL_HITS,
    Completion,
    read_counters,
    read_pool_bytes,
    read_samples,
    send_wave,
    wait_idle,
)

__all__ = ["Deployment", "deploy"]

_TOTALS = re.compile(r"KVPP totals: (\{.*\})")


@dataclass(frozen=True, slots=True)
class ServedWave:
    """One wave: its answers through the proxy, and what the servers' counters added in it."""

    answers: list[Completion]
    prefill: Counter[str]
    decode: Counter[str]
    pool: Counter[str]  # bytes saved and loaded: put, get
    held: tuple[float, float]  # shares of blocks in use afterwards, prefill and decode


@dataclass(frozen=True, slots=True)
class Deployment:
    """Both waves, and a plain engine's answers to the same prompts."""

    prompts: list[list[int]]
    plain: EngineResult
    waves: tuple[ServedWave, ServedWave]
    capacity_blocks: int
    broadcast_bytes: list[int]  # by prefill server, first and second

    def rows(self) -> list[Row]:
        """The table: a column per wave."""
        return [self._capacity(), *self._answers(), *self._hits(), *self._bytes(), *self._end()]

    def _capacity(self) -> Row:
        size = self.plain.block_size
        off, on = self.plain.capacity_blocks * size, self.capacity_blocks * size
        figure = f"{off:,} / {on:,} ({on / off:.3f}x)"
        return Row("capacity of prefill, tokens, KVPP off / on", (figure, ""), on > off)

    def _answers(self) -> list[Row]:
        expected, count = self.plain.waves["first"].tokens, len(self.prompts)
        equal = [
            sum(a.tokens == e for a, e in zip(wave.answers, expected, strict=True))
            for wave in self.waves
        ]
        firsts = [statistics.median(a.first_token_s for a in wave.answers) for wave in self.waves]
        return [
            Row(
                "answers equal to the plain engine's",
                _pair(f"{n} of {count}" for n in equal),
                equal == [count, count],
            ),
            Row("time to first token, median, s", _pair(f"{first:.2f}" for first in firsts)),
        ]

    def _hits(self) -> list[Row]:
        total = sum(map(len, self.prompts))
        local = [wave.prefill[LOCAL_HITS] for wave in self.waves]
        pool = [wave.prefill[EXTERNAL_HITS] for wave in self.waves]
        own = [wave.decode[LOCAL_HITS] for wave in self.waves]
        pulled = [wave.decode[EXTERNAL_HITS] for wave in self.waves]
        return [
            Row(
                f"prompt tokens of {total} that prefill had: own cache + pool",
                _pair(f"{a:.0f} + {b:.0f}" for a, b in zip(local, pool, strict=True)),
                pool[0] == 0 < pool[1],
            ),
            Row(
                "prompt tokens that decode had: own cache + from prefill",
                _pair(f"{a:.0f} + {b:.0f}" for a, b in zip(own, pulled, strict=True)),
                all(a + b == total for a, b in zip(own, pulled, strict=True)) and pulled[0] > 0,
            ),
        ]

    def _bytes(self) -> list[Row]:
        figures: dict[str, list[float]] = {
            "KV broadcast between ranks of prefill, MB": [*self.broadcast_bytes],
            "KV from prefill to decode, MB": [
                wave.decode["vllm:kvpp_p2p_pull_bytes_total"] for wave in self.waves
            ],
            "KV saved into the pool, MB": [wave.pool["put"] for wave in self.waves],
            "KV loaded from the pool, MB": [wave.pool["get"] for wave in self.waves],
        }
        return [
            Row(name, _pair(f"{value / 1e6:.1f}" for value in values))
            for name, values in figures.items()
        ]

    def _end(self) -> list[Row]:
        held = [wave.held for wave in self.waves]
        return [
            Row(
                "KV blocks still held afterwards, prefill and decode",
                _pair(f"{a:.0%} and {b:.0%}" for a, b in held),
                not any(map(any, held)),
            )
        ]


def deploy(settings: DemoSettings, plain: EngineResult) -> Deployment:
    """Send all prompts twice, with a restart of prefill in between.

    Raises:
        ChildFailed: a server ended, or a request failed.
    """
    say = settings.console.print
    with fleet(settings) as servers:
        say("pool, prefill, decode and proxy: up")
        capacity = asyncio.run(_capacity(servers.prefill))
        first = asyncio.run(_wave(servers, settings, Counter()))
        say("first wave: done")
        before = asyncio.run(read_counters(servers.decode))
        asyncio.run(servers.restart("prefill"))
        say("prefill: restarted")
        second = asyncio.run(_wave(servers, settings, before))
        say("second wave: done")
    broadcast = _broadcast_bytes(settings.folder / "prefill.log")
    return Deployment(settings.prompts(), plain, (first, second), capacity, broadcast)


async def _wave(servers: Fleet, settings: DemoSettings, before: Counter[str]) -> ServedWave:
    """Send all prompts. ``before``: decode's counters until now; prefill has just started."""
    answers = await send_wave(servers.proxy, settings.prompts(), settings.max_tokens)
    held = await wait_idle(servers.prefill), await wait_idle(servers.decode)
    decode = await read_counters(servers.decode)
    decode.subtract(before)
    pool = await read_pool_bytes(servers.prefill)
    return ServedWave(answers, await read_counters(servers.prefill), decode, pool, held)


async def _capacity(url: str) -> int:
    """The engine's num_gpu_blocks."""
    for sample in await read_samples(url):
        if "num_gpu_blocks" in sample.labels:
            return int(sample.labels["num_gpu_blocks"])
    raise ChildFailed(f"{url}/metrics has no num_gpu_blocks")


def _broadcast_bytes(log: Path) -> list[int]:
    """Bytes broadcast by the first and the second prefill server, from rank 0's last log line."""
    totals = [ast.literal_eval(found) for found in _TOTALS.findall(log.read_text())]
    per_server = totals[:: max(1, len(totals) // 2)]
    return [sum(total["bytes"].values()) for total in per_server[:2]]


def _pair(figures: Iterable[str]) -> tuple[str, ...]:
    return tuple(figures)
