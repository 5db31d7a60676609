"""Traffic for minutes through the demo's deployment while its engines are killed and restarted.

In rounds: requests, a disturbance among them, more requests, and then a pause without requests, in
which no block may be held and no process may use more than after its first round.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from benchmarks.soak.accounts import GROWTH, Account, Ledger
from benchmarks.soak.traffic import Question, Traffic, TrafficOutcome, make_prompts
from kvpp_connectors.demo.comparison import run_plain
from kvpp_connectors.demo.report import Row, table
from kvpp_connectors.demo.servers import Fleet, fleet, is_healthy
from kvpp_connectors.demo.settings import DemoSettings
from kvpp_connectors.demo.workload import (
    EXTERNAL_HITS,
    LOCAL_HITS,
    read_counters,
    read_pool_bytes,
    wait_idle,
    warm_up,
)

__all__ = ["KV_MIB", "soak"]

QUESTIONS = 96
BOUND_S = 120.0  # of a request, on a machine that starts engines meanwhile
_PART = 24  # requests before a disturbance, and after it
_LEAST = 3  # rounds, however long they take: both engines are killed once
_PROBE_S = 0.25
KV_MIB, _DECODE_MIB, _POOL_MIB = 32, 20, 48  # too little, on purpose
_PLAIN_MIB, _LONGEST, _COMPLAINTS = 128, 320, 20
_ENGINES = ("prefill", "decode")
_PREEMPTED = "vllm:num_preemptions_total"


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What is done to an engine while it serves."""

    server: str
    how: str  # killed, stopped, frozen

    def __str__(self) -> str:
        return f"{self.server} {self.how}"


PLAN = (
    None,
    Disturbance("prefill", "killed"),
    Disturbance("decode", "killed"),
    Disturbance("prefill", "frozen"),
    Disturbance("decode", "stopped"),
    Disturbance("prefill", "stopped"),
    Disturbance("decode", "frozen"),
)


def soak(settings: DemoSettings, minutes: float, clients: int, seed: int) -> list[Row]:
    """Run a plain engine, then the deployment for so long and to the end of a round.

    Prints each request with a wrong, failed or late answer and a table; returns its rows.

    Raises:
        ChildFailed: a server ended by itself, or did not come back.
    """
    say = settings.console.print
    prompts = make_prompts(QUESTIONS, settings.vocabulary)
    settings = replace(
        settings,
        max_model_len=_LONGEST,
        max_num_batched_tokens=128,
        decode_memory=_DECODE_MIB << 20,
        pool_mib=_POOL_MIB,
        decode_load_failures="recompute",
    )
    answers = run_plain(replace(settings, memory=_PLAIN_MIB << 20), prompts).waves["first"]
    pairs = zip(prompts, answers.tokens, strict=True)
    with fleet(settings) as servers:
        say("pool, prefill, decode and proxy: up")
        run = Soak(settings, servers, [Question(*pair) for pair in pairs], seed)
        asyncio.run(run.go(minutes, clients))
    for complaint in run.traffic.complaints[:_COMPLAINTS]:
        say(f"[red]{complaint}[/red]", highlight=False)
    rows = run.rows()
    say(table(("",), rows))
    return rows


class Soak:
    """One soak: traffic, disturbances, and the servers' counters and accounts."""

    def __init__(
        self, settings: DemoSettings, servers: Fleet, questions: Sequence[Question], seed: int
    ) -> None:
        self._settings, self._servers = settings, servers
        self.traffic = Traffic(servers.proxy, questions, seed, BOUND_S)
        self._ledgers = {name: Ledger() for name in servers.servers}
        for ledger in self._ledgers.values():
            ledger.restarted()
        self._before: dict[str, Counter[str]] = {name: Counter() for name in _ENGINES}
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in _ENGINES}
        self._held: list[float] = []  # shares of blocks, prefill and decode, at quiet moments
        self._done: Counter[str] = Counter()  # disturbances

    async def go(self, minutes: float, clients: int) -> None:
        """Run rounds until the time is up."""
        await self._warm_up()
        until = time.monotonic() + minutes * 60
        for number, disturbance in enumerate(cycle(PLAN)):
            if number >= _LEAST and time.monotonic() >= until:
                break
            async with asyncio.TaskGroup() as group:
                group.create_task(self.traffic.run(clients))
                await self.traffic.wait_for_requests(_PART)
                if disturbance is not None:
                    await self._disturb(disturbance)
                await self.traffic.wait_for_requests(_PART)
                self.traffic.stop()
            await self._quiet()
            total = self.traffic.outcomes.total()
            what = disturbance or "nothing disturbed"
            memory = ", ".join(
                f"{n} {self._ledgers[n].last.resident >> 20:,} MiB" for n in _ENGINES
            )
            self._settings.console.print(
                f"round {number + 1}, {what}: {total} requests so far; {memory}"
            )

    def rows(self) -> list[Row]:
        """The table, a column."""
        return [*self._request_rows(), *self._work_rows(), *self._account_rows()]

    async def _disturb(self, what: Disturbance) -> None:
        server = self._servers.servers[what.server]
        with self.traffic.disturbed():
            if what.how == "frozen":
                server.signal(signal.SIGSTOP)
                try:
                    while await is_healthy(self._servers.proxy):
                        await asyncio.sleep(_PROBE_S)
                finally:
                    server.signal(signal.SIGCONT)
                await self._servers.wait_healthy(what.server, "proxy")
            else:
                await self._servers.restart(what.server, kill=what.how == "killed")
                self._ledgers[what.server].restarted()
                self._before[what.server].clear()
                if what.server == "prefill":
                    await self._warm_up()
        self._done[str(what)] += 1

    async def _warm_up(self) -> None:
        """Warm up prefill: each new size of a step makes it grow once. Decode has few sizes."""
        await warm_up(self._servers.prefill, self._settings.max_num_batched_tokens)

    async def _quiet(self) -> None:
        """Without requests: record the blocks held, the counters and the accounts."""
        self._servers.check()
        for name in _ENGINES:
            url = getattr(self._servers, name)
            self._held.append(await wait_idle(url))
            now = await read_counters(url) + await read_pool_bytes(url)
            self._counts[name] += now - self._before[name]
            self._before[name] = now
        for name, server in self._servers.servers.items():
            self._ledgers[name].note(Account.of(server.processes()))

    def _request_rows(self) -> Iterator[Row]:
        outcomes = self.traffic.outcomes
        for outcome in TrafficOutcome:
            count, ok = outcomes[outcome], None
            if outcome in (TrafficOutcome.WRONG, TrafficOutcome.FAILED, TrafficOutcome.LATE):
                ok = count == 0
            elif outcome is TrafficOutcome.RIGHT:
                ok = count > 0
            yield Row(f"requests {outcome}", (f"{count:,}",), ok)
        slowest = f"{self.traffic.slowest_s:.1f} (bound {BOUND_S:.0f})"
        yield Row("slowest complete answer, s", (slowest,))
        done = ", ".join(f"{what} {count}" for what, count in sorted(self._done.items()))
        yield Row("disturbances", (done or "none",))

    def _work_rows(self) -> Iterator[Row]:
        prefill, decode = (self._counts[name] for name in _ENGINES)
        preempted = prefill[_PREEMPTED], decode[_PREEMPTED]
        figure = f"{preempted[0]:,.0f} and {preempted[1]:,.0f}"
        whole = len(self._held) // 2 >= len(PLAN)  # every disturbance has happened
        ok = any(preempted) or (False if whole else None)
        yield Row("preempted in prefill and decode", (figure,), ok)
        own, pool, pulled = prefill[LOCAL_HITS], prefill[EXTERNAL_HITS], decode[EXTERNAL_HITS]
        figure = f"{own:,.0f}, {pool:,.0f}, {pulled:,.0f}"
        yield Row(
            "prompt tokens from prefill's cache, the pool, prefill to decode",
            (figure,),
            min(pool, pulled) > 0,
        )
        figure = f"{prefill['put'] / 1e6:,.0f} and {prefill['get'] / 1e6:,.0f}"
        yield Row(
            f"MB saved into a pool of {self._settings.pool_mib} MiB, and loaded",
            (figure,),
            prefill["put"] > self._settings.pool_mib << 20,
        )
        held = f"{max(self._held, default=0):.0%} in {len(self._held) // 2} quiet moments"
        yield Row("KV blocks held at most without requests", (held,), not any(self._held))

    def _account_rows(self) -> Iterator[Row]:
        for name, ledger in self._ledgers.items():
            last, grown = ledger.last, ledger.growth
            figure = (
                f"{last.files} ({grown.files:+}), {last.threads} ({grown.threads:+}), "
                f"{last.maps} ({grown.maps:+}), "
                f"{last.resident >> 20} ({grown.resident / (1 << 20):+.1f})"
            )
            yield Row(
                f"{name}: files, threads, maps, MiB; growth ({ledger.moments} comparisons)",
                (figure,),
                grown.within(GROWTH),
            )
