"""Prefill and decode as two servers behind the proxy: the second table of the demo."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from dataclasses import dataclass

from kvpp_connectors.demo.report import Row
from kvpp_connectors.demo.servers import Fleet, FleetSettings, fleet
from kvpp_connectors.demo.settings import Settings
from kvpp_connectors.demo.workload import Answer, read_counters, send_wave, wait_idle

__all__ = ["Disaggregation", "disaggregate"]


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """What came through the proxy, and what the servers counted."""

    prompts: list[list[int]]
    expected: list[list[int]]
    answers: list[Answer]
    prefill: Counter[str]
    decode: Counter[str]
    held: tuple[float, float]  # shares of blocks in use at the end, prefill and decode

    def rows(self) -> list[Row]:
        """What the table says: one column of figures."""
        equal = sum(a.tokens == e for a, e in zip(self.answers, self.expected, strict=True))
        prompt_tokens = sum(map(len, self.prompts))
        pulls = self.decode["vllm:kvpp_p2p_pulls_total"]
        loaded = self.decode["vllm:external_prefix_cache_hits_total"]
        own = self.decode["vllm:prefix_cache_hits_total"]
        megabytes = self.decode["vllm:kvpp_p2p_pull_bytes_total"] / 1e6
        seconds = self.decode["vllm:kvpp_p2p_pull_seconds_sum"]
        granted, read = (self.prefill[f"vllm:kvpp_p2p_leases_{w}_total"] for w in _LEASES)
        first = statistics.median(answer.first_token_s for answer in self.answers)
        count = len(self.prompts)
        return [
            Row("answers equal to the plain engine's", (f"{equal} of {count}",), equal == count),
            Row(
                "prompt tokens at decode: from prefill + from its own cache / all",
                (f"{loaded:.0f} + {own:.0f} / {prompt_tokens}",),
                loaded + own == prompt_tokens and loaded > own,
            ),
            Row(
                "pulls; MB, and seconds of pulling",
                (f"{pulls:.0f}; {megabytes:.1f}, {seconds:.2f}",),
                pulls == count,
            ),
            Row(
                "offers of prefill; read by decode",
                (f"{granted:.0f}; {read:.0f}",),
                granted == read == count,
            ),
            Row(
                "KV blocks still held at the end, prefill and decode",
                (f"{self.held[0]:.0%} and {self.held[1]:.0%}",),
                not any(self.held),
            ),
            Row("time to first token through the proxy, median, s", (f"{first:.2f}",)),
        ]


_LEASES = ("granted", "read")


def disaggregate(settings: Settings, expected: list[list[int]]) -> Disaggregation:
    """Send all prompts through the proxy; ``expected`` are a plain engine's tokens.

    Raises:
        ChildFailed: a server ended, or a request failed.
    """
    configured = FleetSettings(
        model=settings.model,
        tensor_parallel_size=settings.tensor_parallel_size,
        kv_cache_memory_bytes=settings.memory,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        logs=settings.folder,
        environment=settings.environment,
    )
    with fleet(configured, settings.console) as servers:
        settings.console.print("prefill, decode and proxy: up")
        result = asyncio.run(_work(servers, settings, expected))
    settings.console.print("requests through the proxy: done")
    return result


async def _work(servers: Fleet, settings: Settings, expected: list[list[int]]) -> Disaggregation:
    prompts = settings.prompts()
    answers = await send_wave(servers.proxy, prompts, settings.max_tokens)
    held = await wait_idle(servers.prefill), await wait_idle(servers.decode)
    counters = await read_counters(servers.prefill), await read_counters(servers.decode)
    return Disaggregation(prompts, expected, answers, *counters, held)
