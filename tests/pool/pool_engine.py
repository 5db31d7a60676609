"""Engines with AscendStoreConnector in processes of their own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpp_connectors.pool.stats import PoolStats
from tests.engine.harness import Engine
from tests.p2p.engine_process import Served
from tests.p2p.remote_engine import RemoteEngine
from tests.pool.store_faults import Gate

__all__ = ["MTP", "PoolEngine", "counted", "transfer"]

MTP = {"method": "mtp", "num_speculative_tokens": 1}


def transfer(master: str, **extra: Any) -> dict[str, Any]:
    """A kv_transfer_config of our connector. The lookup may take its time on a busy machine."""
    return {
        "kv_connector": "AscendStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "mooncake": {"master_server_address": master, "global_segment_size": 0},
            "lookup_deadline_s": 30.0,
            "lookup_wait_s": 1.0,
            **extra,
        },
    }


def counted(stats: PoolStats) -> Counter[str]:
    """The counters from now on; vLLM drains the stats themselves."""
    counts: Counter[str] = Counter()
    original = stats.add

    def add(name: str, amount: int = 1) -> None:
        counts[name] += amount
        original(name, amount)

    stats.add = add  # type: ignore[method-assign]
    return counts


class ServedPool(Served):
    """More commands, and a watch over how long the connector holds the scheduler."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        connector = engine._scheduler.connector
        self._longest = 0.0
        self._counts = counted(connector._stats)
        self._scheduler = engine._scheduler
        self._keys: list[tuple[str, ...]] = []
        original = connector.get_num_new_matched_tokens

        def timed(request: Any, computed: int) -> Any:
            started = time.monotonic()
            answer = original(request, computed)
            self._longest = max(self._longest, time.monotonic() - started)
            self._keys = connector._scheduler._keys_beyond(request, 0)
            return answer

        connector.get_num_new_matched_tokens = timed

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> list[dict[str, Any]]:
        """The answers to prompts that come together; nothing is held or being saved afterwards."""
        answers = [self.finish(name) for name in [self.add(list(p), max_tokens) for p in prompts]]
        self.settle()
        return answers

    def watch_preemptions(self, folder: Path) -> None:
        """Write down each preemption when it is decided; its step may stand still then."""
        original = type(self._scheduler)._preempt_request

        def preempt(*args: Any, **kwargs: Any) -> Any:
            Gate(folder).write(-1, "preempted")
            return original(self._scheduler, *args, **kwargs)

        self._scheduler._preempt_request = preempt

    def keys(self) -> list[tuple[str, ...]]:
        """What the last request looked for, by block; without those of single layers."""
        return self._keys

    def longest_lookup(self) -> float:
        """The longest that the scheduler was ever held by a lookup, in seconds."""
        return self._longest

    def lookups(self) -> dict[str, int]:
        """The scheduler half's counters."""
        return dict(self._counts)


class PoolEngine(RemoteEngine):
    """The test's end."""

    _kind = ServedPool

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> list[dict[str, Any]]:
        """The answers to prompts that come together, from an empty prefix cache."""
        self.ask("reset")
        answers: list[dict[str, Any]] = self.ask("run", 300, prompts=prompts, max_tokens=max_tokens)
        return answers

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker; the answers by rank."""
        answers: list[Any] = self.ask("call_all", method=method, arguments=arguments)
        return answers
