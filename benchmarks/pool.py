"""`python -m benchmarks pool`: the cost of saving and loading blocks, against Mooncake alone.

With a real mooncake_master; the pool's memory is lent by another process, over tcp, or by this one.
Raw is one batch call of Mooncake for the same bytes, packed already; saving and loading do all that
an engine's worker does: look up, pack from a cache per layer, header, transfer, verify; and back.
All ways use the same client. docs/performance.md.
"""

from __future__ import annotations

import itertools
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.base import (
    AsJson,
    AsMarkdown,
    Figures,
    Picture,
    Table,
    conclude,
    curves_of,
    extent,
)
from benchmarks.interleaved import (
    Spread,
    Way,
    interleave,
    medians,
    one_thread,
    ratio,
)
from benchmarks.pool_engines import LENGTH, PROMPTS, EngineTiming, time_engines
from benchmarks.pool_sides import LAYERS, Client, pool
from benchmarks.timeouts import set_long_timeouts

__all__ = ["PoolFigures", "PoolTiming", "bench_pool"]

_SIZES_KIB = (64, 256, 1024, 4096)
_HEADS = (
    *("memory", "objects", "raw put", "save", "save / raw"),
    *("raw get", "load", "load / raw", "ask", "pack", "unpack"),
)


@dataclass(frozen=True, slots=True)
class PoolTiming:
    """Objects of one size: median seconds by way, and ratios within a turn."""

    memory: str  # of the pool: own, or another process's
    object_kib: int
    megabytes: float
    raw_put: float
    save: float
    raw_get: float
    load: float
    ask: float  # lookups before and after a put
    pack: float  # blocks out of the caches
    unpack: float  # blocks into the caches
    save_to_raw_goodput: Spread
    load_to_raw_goodput: Spread


@dataclass(frozen=True, slots=True)
class PoolFigures(Figures):
    """Objects of every size, and engines with --engines."""

    objects: list[PoolTiming]
    engines: list[EngineTiming]

    def tables(self) -> list[Table]:
        title = f"Saving and loading blocks of {LAYERS} layers over tcp, GB/s"
        tables = [Table(title, _HEADS, tuple(map(_row, self.objects)))]
        title = f"{PROMPTS} prompts of {LENGTH} tokens in an engine, seconds"
        heads = ("prompts", "vLLM's", "ours", "faster than vLLM's")
        tables += [Table(title, heads, _engine_rows(timing)) for timing in self.engines]
        return tables

    def summary(self) -> str:
        saves = extent("goodput, save / raw", (t.save_to_raw_goodput for t in self.objects))
        return f"{saves}; {extent('load / raw', (t.load_to_raw_goodput for t in self.objects))}"

    def picture(self) -> Picture:
        curves = curves_of(
            (f"{way}, {t.memory} memory", t.object_kib, ratio)
            for t in self.objects
            for way, ratio in (("save", t.save_to_raw_goodput), ("load", t.load_to_raw_goodput))
        )
        title = "Saving and loading over tcp, against Mooncake alone"
        return Picture(title, "object, KiB", "goodput / raw", curves, log_x=True)


def bench_pool(
    megabytes: Annotated[int, typer.Option(min=4, help="Bytes of one save or load, MiB.")] = 64,
    repeats: Annotated[int, typer.Option(min=3, help="Saves and loads per figure.")] = 21,
    engines: Annotated[
        bool, typer.Option(help="Also run engines, against vLLM's MooncakeStoreConnector.")
    ] = False,
    engine_repeats: Annotated[
        int, typer.Option(min=3, help="Rounds of all prompts in each engine.")
    ] = 7,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Time saving and loading over tcp on this machine against raw batched Mooncake."""
    conclude(
        "pool",
        lambda: _measure(megabytes, repeats, engine_repeats if engines else 0),
        as_json,
        as_markdown,
    )


def _measure(megabytes: int, repeats: int, engine_repeats: int) -> PoolFigures:
    set_long_timeouts()
    with one_thread():
        return PoolFigures(
            [
                timing
                for lent in (False, True)
                for timing in _time_all(megabytes, repeats, own_memory=lent)
            ],
            [_time_engines(engine_repeats)] if engine_repeats else [],
        )


def _time_all(megabytes: int, repeats: int, *, own_memory: bool) -> list[PoolTiming]:
    """All sizes, with the pool's memory in this process or in another."""
    size = 8 * (megabytes << 20)  # four sets of objects, and enough for no eviction
    with pool(size, own_memory) as (_, backend):
        return [
            _time(Client(backend, kib << 10, max(1, (megabytes << 20) // (kib << 10))), repeats,
                  "own" if own_memory else "other")
            for kib in _SIZES_KIB
        ]  # fmt: skip


def _time_engines(repeats: int) -> EngineTiming:
    with (
        tempfile.TemporaryDirectory(prefix="kvpp-bench-") as folder,
        pool(4 << 30, own_memory=False) as (master, _),
    ):
        return time_engines(master, Path(folder), repeats)


def _time(client: Client, repeats: int, memory: str) -> PoolTiming:
    with closing(client):
        ways = _ways(client)
        turns = interleave(ways, repeats, client.remove_new)
        client.clear()
        ways["load"]()
        client.check()
    return PoolTiming(
        memory,
        client.object_bytes >> 10,
        client.bytes / 1e6,
        save_to_raw_goodput=ratio(turns, "raw_put", "save"),
        load_to_raw_goodput=ratio(turns, "raw_get", "load"),
        **medians(turns),
    )


def _ways(client: Client) -> dict[str, Way]:
    """All ways by name. Puts use new keys each time, gets the same ones."""
    old_raw, old_ours = client.keys("old-raw"), client.objects("old-ours")
    client.raw_put(old_raw)
    client.save(old_ours)
    numbers = itertools.count()

    def new(kind: str) -> str:
        return f"new-{kind}-{next(numbers)}"

    def raw_put() -> None:
        client.raw_put(client.keys(new("raw")))

    def save() -> None:
        client.save(client.objects(new("ours")))

    def raw_get() -> None:
        client.raw_get(old_raw)

    def load() -> None:
        client.load(old_ours)

    return {
        "raw_put": raw_put,
        "save": save,
        "raw_get": raw_get,
        "load": load,
        "ask": lambda: client.ask(old_raw),
        "pack": client.pack,
        "unpack": client.unpack,
    }


def _row(t: PoolTiming) -> tuple[str, ...]:
    return (
        *(t.memory, f"{t.object_kib} KiB"),
        *(f"{t.megabytes / t.raw_put / 1e3:.2f}", f"{t.megabytes / t.save / 1e3:.2f}"),
        str(t.save_to_raw_goodput),
        *(f"{t.megabytes / t.raw_get / 1e3:.2f}", f"{t.megabytes / t.load / 1e3:.2f}"),
        str(t.load_to_raw_goodput),
        *(f"{part / t.save:.0%}" for part in (t.ask, t.pack)),
        f"{t.unpack / t.load:.0%}",
    )


def _engine_rows(t: EngineTiming) -> tuple[tuple[str, ...], ...]:
    return (
        ("new", f"{t.vllm_new:.2f}", f"{t.ours_new:.2f}", str(t.ours_to_vllm_new)),
        ("loaded", f"{t.vllm_again:.2f}", f"{t.ours_again:.2f}", str(t.ours_to_vllm_again)),
    )
