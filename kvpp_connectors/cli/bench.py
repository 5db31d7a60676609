"""`kvpp bench broadcast`: one layer's broadcast in each mode, against the raw transport."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from kvpp_core.group import KvppGroup

__all__ = ["Case", "Timing", "bench_broadcast"]

_TIMEOUT_S = 60.0
_MODES = ("full", "runs", "packed")


@dataclass(frozen=True, slots=True)
class Case:
    """Which blocks of a pool are active."""

    name: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of one case: the raw broadcast of the active bytes, and each mode."""

    case: Case
    raw: float
    modes: dict[str, float]
    auto: str


@dataclass(frozen=True, slots=True)
class _World:
    """What every rank needs to know."""

    ranks: int
    rendezvous: str
    num_blocks: int
    block_bytes: int
    repeats: int
    cases: tuple[Case, ...]


def bench_broadcast(
    ranks: Annotated[int, typer.Option(min=2, help="Processes in the gloo group.")] = 2,
    layer_mib: Annotated[int, typer.Option(min=1, help="Size of one layer's pool, MiB.")] = 64,
    block_kib: Annotated[int, typer.Option(min=1, help="Size of one block, KiB.")] = 36,
    repeats: Annotated[int, typer.Option(min=3, help="Broadcasts per figure.")] = 9,
) -> None:
    """Time one layer's broadcast over gloo on this machine, in every mode.

    Prints ratios to a plain broadcast of just the active bytes, taken in turns in one run, and
    what `auto` would choose. Times are those of the slowest rank.
    """
    num_blocks = (layer_mib << 20) // (block_kib << 10)
    if num_blocks < 20:
        typer.echo("--layer-mib must hold at least 20 blocks of --block-kib", err=True)
        raise typer.Exit(2)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="kvpp-bench-") as folder:
        world = _World(
            ranks=ranks,
            rendezvous=f"file://{folder}/rendezvous",
            num_blocks=num_blocks,
            block_bytes=block_kib << 10,
            repeats=repeats,
            cases=_cases(num_blocks),
        )
        with console.status(f"{ranks} ranks, {num_blocks} blocks of {block_kib} KiB"):
            timings = _run(world, Path(folder) / "timings")
    console.print(_table(world, timings))


def _cases(num_blocks: int) -> tuple[Case, ...]:
    numbers = random.Random(0)
    cases = []
    for percent in (5, 20, 50, 90):
        count = max(num_blocks * percent // 100, 1)
        cases.append(Case(f"{percent}%, one run", tuple(range(count))))
        scattered = sorted(numbers.sample(range(num_blocks), count))
        cases.append(Case(f"{percent}%, scattered", tuple(scattered)))
    return tuple(cases)


def _run(world: _World, result: Path) -> list[Timing]:
    from torch.multiprocessing.spawn import spawn

    spawn(_rank_main, (world, str(result)), nprocs=world.ranks)
    return [
        Timing(case, **timing)
        for case, timing in zip(world.cases, json.loads(result.read_text()), strict=True)
    ]


def _rank_main(rank: int, world: _World, result: str) -> None:
    """One rank: time every case; rank 0 writes the result."""
    import torch
    import torch.distributed as dist

    from kvpp_core.group import make_group

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=world.rendezvous, rank=rank, world_size=world.ranks)
    group = make_group([range(world.ranks)], rank, "gloo", _TIMEOUT_S)
    timings = [_time_case(world, group, case) for case in world.cases]
    if rank == 0:
        Path(result).write_text(json.dumps(timings))
    group.close()
    dist.destroy_process_group()


def _time_case(world: _World, group: KvppGroup, case: Case) -> dict[str, object]:
    import torch

    from kvpp_core.bundles import Component, LayerBundle
    from kvpp_core.device import CpuStream
    from kvpp_core.layout import Placement, build_layout
    from kvpp_core.policy import BroadcastPolicy, History, Mode, choose_mode, cost_model
    from kvpp_core.transfer import BundleTransfer

    bundle = LayerBundle(0, (Component("cache", world.block_bytes),))
    layout = build_layout(Placement((bundle,), (0,), world.ranks, group.rank), world.num_blocks)
    stream = CpuStream()
    staging = torch.zeros(world.num_blocks * world.block_bytes, dtype=torch.int8)
    transfer = BundleTransfer(
        layout, torch.ones(layout.size, dtype=torch.int8), staging, group, stream
    )
    history = History.of(case.blocks, world.num_blocks)
    index = torch.tensor(case.blocks)
    raw = torch.ones(len(case.blocks) * world.block_bytes, dtype=torch.int8)

    def send(mode: str) -> None:
        transfer.start(0, Mode(mode), history, index)
        stream.record().wait(_TIMEOUT_S)

    ways: dict[str, Callable[[], object]] = {"raw": lambda: group.broadcast(raw, 0).wait()}
    ways |= {mode: partial(send, mode) for mode in _MODES}
    seconds = _in_turns(ways, group, world.repeats)
    cost = cost_model("gloo", world.ranks)
    auto = choose_mode(bundle, history, BroadcastPolicy.AUTO, cost, staging.numel())
    return {"raw": seconds.pop("raw"), "modes": seconds, "auto": auto.value}


def _in_turns(
    ways: dict[str, Callable[[], object]], group: KvppGroup, repeats: int
) -> dict[str, float]:
    """Median over ``repeats`` of the slowest rank's seconds, the ways taken in turns."""
    import torch
    import torch.distributed as dist

    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            dist.barrier(group=group.control)
            started = time.perf_counter()
            way()
            slowest = torch.tensor([time.perf_counter() - started])
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group.control)
            if turn > 0:  # the first one warms up
                samples[name].append(float(slowest))
    return {name: statistics.median(values) for name, values in samples.items()}


def _table(world: _World, timings: Sequence[Timing]) -> Table:
    table = Table(
        "active blocks",
        "raw, ms",
        *(f"{mode} / raw" for mode in _MODES),
        "auto",
        "auto / raw",
        "auto / full",
        title=f"{world.ranks} ranks, {world.num_blocks} blocks of {world.block_bytes >> 10} KiB",
    )
    for timing in timings:
        chosen = timing.modes[timing.auto]
        table.add_row(
            timing.case.name,
            f"{timing.raw * 1e3:.2f}",
            *(f"{timing.modes[mode] / timing.raw:.2f}" for mode in _MODES),
            timing.auto,
            f"{chosen / timing.raw:.2f}",
            f"{chosen / timing.modes['full']:.3f}",
        )
    return table
