"""`kvpp bench broadcast`: one layer's broadcast in each mode, against the raw transport."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvpp_connectors.cli.bench.turns import show
from kvpp_connectors.cli.gloo_ranks import TIMEOUT_S, run_ranks

if TYPE_CHECKING:
    from kvpp_core.group import KvppGroup
    from kvpp_core.policy import CostModel

__all__ = ["Timing", "bench_broadcast"]

_MODES = ("full", "runs", "packed")
_PERCENT = (1, 5, 20, 50, 90, 100)  # of the pool's blocks that are active
_STAGING_BYTES = 32 << 20  # the default of additional_config.kvpp.staging_bytes


@dataclass(frozen=True, slots=True)
class Timing:
    """One layer and set of active blocks: median seconds, of the slowest rank."""

    layer_mib: int
    active: str
    raw: float  # a plain broadcast of just the active bytes
    full: float
    runs: float
    packed: float
    auto: str  # the mode that it chooses

    @property
    def chosen(self) -> float:
        """Seconds of the mode that `auto` chooses."""
        seconds: float = getattr(self, self.auto)
        return seconds


def bench_broadcast(
    ranks: Annotated[int, typer.Option(min=2, help="Processes in the gloo group.")] = 2,
    layer_mib: Annotated[
        str, typer.Option(help="Sizes of one layer's pool in MiB, separated by commas.")
    ] = "64,256",
    block_kib: Annotated[int, typer.Option(min=1, help="Size of one block, KiB.")] = 36,
    repeats: Annotated[int, typer.Option(min=3, help="Broadcasts per figure.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a table for docs/benchmarks.md.")
    ] = False,
) -> None:
    """Time one layer's broadcast over gloo on this machine, in every mode.

    Prints ratios to a plain broadcast of just the active bytes, taken in turns in one run, and
    what `auto` chooses with the costs that it measures first. Times are those of the slowest rank.
    """
    sizes = [int(size) for size in layer_mib.split(",")]
    if any((size << 10) // block_kib < 20 for size in sizes):
        typer.echo("--layer-mib must hold at least 20 blocks of --block-kib", err=True)
        raise typer.Exit(2)
    with Console(stderr=True).status(f"{ranks} ranks, layers of {layer_mib} MiB"):
        measured = run_ranks(ranks, _measure, sizes, block_kib << 10, repeats)
    timings = [Timing(**timing) for timing in measured["timings"]]
    if as_json:
        typer.echo(json.dumps(measured, indent=2))
        return
    typer.echo(f"A broadcast costs {measured['costs']}.")
    show(f"{ranks} ranks, blocks of {block_kib} KiB", _rows(timings), markdown)


def _measure(group: KvppGroup, sizes: list[int], block_bytes: int, repeats: int) -> dict[str, Any]:
    """On every rank: all cases of all sizes."""
    from kvpp_core.calibration import measure_costs
    from kvpp_core.device import CpuDevice

    cost = measure_costs(group, CpuDevice(TIMEOUT_S), "cpu", TIMEOUT_S)
    timings = []
    for mib in sizes:
        pool = _Pool(group, (mib << 20) // block_bytes, block_bytes, cost, repeats)
        timings += [
            asdict(pool.time(mib, active, blocks)) for active, blocks in _cases(pool.num_blocks)
        ]
    return {"costs": str(cost), "timings": timings}


def _cases(num_blocks: int) -> list[tuple[str, tuple[int, ...]]]:
    """Active blocks, by name."""
    numbers = random.Random(0)
    cases = []
    for percent in _PERCENT:
        count = max(num_blocks * percent // 100, 1)
        cases.append((f"{percent}%, one run", tuple(range(count))))
        if percent < 100:
            scattered = tuple(sorted(numbers.sample(range(num_blocks), count)))
            cases.append((f"{percent}%, scattered", scattered))
    return cases


class _Pool:
    """One layer's cache on every rank."""

    def __init__(
        self, group: KvppGroup, num_blocks: int, block_bytes: int, cost: CostModel, repeats: int
    ) -> None:
        import torch

        from kvpp_core.bundles import Component, LayerBundle
        from kvpp_core.device import CpuStream
        from kvpp_core.layout import Placement, build_layout
        from kvpp_core.transfer import BundleTransfer

        self.num_blocks = num_blocks
        self._group, self._cost, self._repeats = group, cost, repeats
        self._bundle = LayerBundle(0, (Component("cache", block_bytes),))
        placement = Placement((self._bundle,), (0,), group.size, group.rank)
        layout = build_layout(placement, num_blocks)
        self._stream = CpuStream()
        self._transfer = BundleTransfer(
            layout,
            torch.ones(layout.size, dtype=torch.int8),
            torch.zeros(_STAGING_BYTES, dtype=torch.int8),
            group,
            self._stream,
        )

    def time(self, layer_mib: int, active: str, blocks: tuple[int, ...]) -> Timing:
        """Every mode, in turns."""
        import torch

        from kvpp_core.policy import BroadcastPolicy, History, Mode, choose_mode

        history = History.of(blocks, self.num_blocks)
        index = torch.tensor(blocks)
        raw = torch.ones(len(blocks) * self._bundle.bytes_per_block, dtype=torch.int8)

        def send(mode: str) -> None:
            self._transfer.start(0, Mode(mode), history, index)
            self._stream.record().wait(TIMEOUT_S)

        ways: dict[str, Callable[[], object]] = {
            "raw": lambda: self._group.broadcast(raw, 0).wait()
        }
        ways |= {mode: partial(send, mode) for mode in _MODES}
        policy = BroadcastPolicy.AUTO
        auto = choose_mode(self._bundle, history, policy, self._cost, _STAGING_BYTES)
        seconds = _together(ways, self._group, self._repeats)
        return Timing(layer_mib, active, **seconds, auto=auto.value)


def _together(
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


def _rows(timings: list[Timing]) -> list[tuple[str, ...]]:
    """The table, its head first."""
    heads = ("layer, MiB", "active blocks", "raw, ms", *(f"{mode} / raw" for mode in _MODES))
    rows: list[tuple[str, ...]] = [(*heads, "auto", "auto / raw", "auto / best")]
    for timing in timings:
        best = min(timing.full, timing.packed)
        rows.append(
            (
                str(timing.layer_mib),
                timing.active,
                f"{timing.raw * 1e3:.2f}",
                *(f"{getattr(timing, mode) / timing.raw:.2f}" for mode in _MODES),
                timing.auto,
                f"{timing.chosen / timing.raw:.2f}",
                f"{timing.chosen / best:.2f}",
            )
        )
    return rows
