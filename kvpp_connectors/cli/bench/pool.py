"""`kvpp bench pool`: what saving and loading blocks costs, against Mooncake alone.

A real mooncake_master; the pool's memory is lent by another process, over tcp, or by this one. Raw
is one batch call of Mooncake for the same bytes, which lie packed already; saving and loading do
everything that an engine's worker does: ask what is there, pack from one cache a layer, header,
transfer, verify; and back. Every way uses the same client. docs/benchmarks.md.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvpp_connectors.cli.bench.pool_engines import LENGTH, PROMPTS, EngineTiming, time_engines
from kvpp_connectors.cli.bench.pool_sides import LAYERS, Client, pool
from kvpp_connectors.cli.bench.turns import Way, in_turns, medians, ratio, show

__all__ = ["PoolTiming", "bench_pool"]

_SIZES_KIB = (64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class PoolTiming:
    """Objects of one size: median seconds by way, and ratios within a turn."""

    memory: str  # the objects are put into: own, or another process's
    object_kib: int
    megabytes: float
    raw_put: float
    save: float
    raw_get: float
    load: float
    ask: float  # the store, before and after a put
    pack: float  # blocks out of the caches
    unpack: float  # blocks into the caches
    save_to_raw_goodput: float
    load_to_raw_goodput: float


def bench_pool(
    megabytes: Annotated[int, typer.Option(min=4, help="Bytes of one save or load, MiB.")] = 64,
    repeats: Annotated[int, typer.Option(min=3, help="Saves and loads per figure.")] = 21,
    engines: Annotated[
        bool, typer.Option(help="Also run engines, against vLLM's MooncakeStoreConnector.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print tables for docs/benchmarks.md.")
    ] = False,
) -> None:
    """Time saving and loading over tcp on this machine against raw batched Mooncake."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker's threads, which share the processor with the model
    try:
        timings = [
            timing
            for lent in (False, True)
            for timing in _time_all(megabytes, repeats, own_memory=lent)
        ]
        compared = [_time_engines(repeats)] if engines else []
    finally:
        torch.set_num_threads(threads)
    if as_json:
        rows = {
            "objects": [asdict(timing) for timing in timings],
            "engines": [asdict(timing) for timing in compared],
        }
        typer.echo(json.dumps(rows, indent=2))
        return
    title = f"Saving and loading blocks of {LAYERS} layers over tcp, GB/s"
    show(title, _rows(timings), markdown)
    for timing in compared:
        title = f"{PROMPTS} prompts of {LENGTH} tokens in an engine, seconds"
        show(title, _engine_rows(timing), markdown)


def _time_all(megabytes: int, repeats: int, *, own_memory: bool) -> list[PoolTiming]:
    """All sizes, with the pool's memory in this process or in another."""
    size = 8 * (megabytes << 20)  # four sets of objects, and room so that nothing is evicted
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
        turns = in_turns(_ways(client), repeats, client.remove_new)
    return PoolTiming(
        memory,
        client.object_bytes >> 10,
        client.bytes / 1e6,
        save_to_raw_goodput=ratio(turns, "raw_put", "save"),
        load_to_raw_goodput=ratio(turns, "raw_get", "load"),
        **medians(turns),
    )


def _ways(client: Client) -> dict[str, Way]:
    """Puts are of new keys each time, gets of the same ones."""
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


def _rows(timings: Sequence[PoolTiming]) -> list[tuple[str, ...]]:
    heads = (
        *("memory", "objects", "raw put", "save", "save / raw"),
        *("raw get", "load", "load / raw", "ask", "pack", "unpack"),
    )
    return [
        heads,
        *(
            (
                *(t.memory, f"{t.object_kib} KiB"),
                *(f"{t.megabytes / t.raw_put / 1e3:.2f}", f"{t.megabytes / t.save / 1e3:.2f}"),
                f"{t.save_to_raw_goodput:.2f}",
                *(f"{t.megabytes / t.raw_get / 1e3:.2f}", f"{t.megabytes / t.load / 1e3:.2f}"),
                f"{t.load_to_raw_goodput:.2f}",
                *(f"{part / t.save:.0%}" for part in (t.ask, t.pack)),
                f"{t.unpack / t.load:.0%}",
            )
            for t in timings
        ),
    ]


def _engine_rows(t: EngineTiming) -> list[tuple[str, ...]]:
    return [
        ("prompts", "vLLM's", "ours", "faster than vLLM's"),
        ("new", f"{t.vllm_new:.2f}", f"{t.ours_new:.2f}", f"{t.ours_to_vllm_new:.2f}"),
        ("loaded", f"{t.vllm_again:.2f}", f"{t.ours_again:.2f}", f"{t.ours_to_vllm_again:.2f}"),
    ]
