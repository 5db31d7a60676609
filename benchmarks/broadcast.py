"""`benchmarks broadcast`: one layer's broadcast in each mode, against the raw transport."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.console import Console

from benchmarks.base import (
    AsJson,
    AsMarkdown,
    Figures,
    Picture,
    Table,
    conclude,
    curves_of,
    extent,
    whole_numbers,
)
from benchmarks.interleaved import Spread, interleave, medians, ratio, spread
from kvpp_connectors.cli.gloo_ranks import TIMEOUT_S, RanksFailed, run_ranks
from kvpp_connectors.launch.options import KvppOptions

if TYPE_CHECKING:
    from kvpp_core.group import KvppGroup
    from kvpp_core.policy import CostModel

__all__ = ["BroadcastFigures", "BroadcastTiming", "bench_broadcast"]

_MODES = ("full", "runs", "packed")
_PERCENT = (1, 5, 20, 50, 90, 100)  # of the pool's blocks that are active
_STAGING_BYTES = KvppOptions().staging_bytes


@dataclass(frozen=True, slots=True)
class BroadcastTiming:
    """One layer and set of active blocks: median seconds of the slowest rank, ratios of time."""

    layer_mib: int
    percent: int  # of the blocks that are active
    scattered: bool  # or in one run
    raw: float  # a plain broadcast of the active bytes alone
    full: float
    runs: float
    packed: float
    auto: str  # the mode that `auto` chooses
    full_to_raw: Spread
    runs_to_raw: Spread
    packed_to_raw: Spread
    auto_to_raw: Spread
    auto_to_best: Spread  # to the better of full and packed

    @property
    def case(self) -> str:
        """The active blocks as text."""
        return f"{self.percent}%, {self.kind}"

    @property
    def kind(self) -> str:
        """How the active blocks lie."""
        return "scattered" if self.scattered else "one run"


@dataclass(frozen=True, slots=True)
class BroadcastFigures(Figures):
    """Timings of all layers and sets of active blocks."""

    ranks: int
    block_kib: int
    costs: str  # of a broadcast, as `auto` measured them; text
    timings: list[BroadcastTiming]

    def tables(self) -> list[Table]:
        heads = ("layer, MiB", "active blocks", "raw, ms", *(f"{mode} / raw" for mode in _MODES))
        rows = [
            (
                *(str(t.layer_mib), t.case, f"{t.raw * 1e3:.2f}"),
                *(f"{r.median:.2f}" for r in (t.full_to_raw, t.runs_to_raw, t.packed_to_raw)),
                *(t.auto, str(t.auto_to_raw), str(t.auto_to_best)),
            )
            for t in self.timings
        ]
        title = (
            f"{self.ranks} ranks, blocks of {self.block_kib} KiB; a broadcast costs {self.costs}"
        )
        return [Table(title, (*heads, "auto", "auto / raw", "auto / best"), tuple(rows))]

    def summary(self) -> str:
        return extent("auto / best of full and packed", (t.auto_to_best for t in self.timings))

    def picture(self) -> Picture:
        curves = curves_of(
            (f"layer of {t.layer_mib} MiB, {t.kind}", t.percent, t.auto_to_raw)
            for t in self.timings
        )
        title = "One layer's broadcast, in the mode that auto chooses"
        return Picture(title, "active blocks, % of the pool", "time / raw", curves)


def bench_broadcast(
    ranks: Annotated[int, typer.Option(min=2, help="Processes in the gloo group.")] = 2,
    layer_mib: Annotated[
        str, typer.Option(help="Sizes of one layer's pool in MiB, separated by commas.")
    ] = "64,256",
    block_kib: Annotated[int, typer.Option(min=1, help="Size of one block, KiB.")] = 36,
    repeats: Annotated[int, typer.Option(min=3, help="Broadcasts per figure.")] = 9,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Time one layer's broadcast over gloo on this machine, in every mode.

    Prints ratios to a plain broadcast of the active bytes alone, taken in turns in one run, and the
    mode that `auto` chooses with costs measured first. Times are those of the slowest rank.
    """
    sizes = whole_numbers("--layer-mib", layer_mib)
    if any((size << 10) // block_kib < 20 for size in sizes):
        typer.echo("--layer-mib must hold at least 20 blocks of --block-kib", err=True)
        raise typer.Exit(2)
    conclude("broadcast", lambda: _measure(ranks, sizes, block_kib, repeats), as_json, as_markdown)


def _measure(ranks: int, sizes: list[int], block_kib: int, repeats: int) -> BroadcastFigures:
    with Console(stderr=True).status(f"{ranks} ranks, layers of {sizes} MiB"):
        try:
            measured = run_ranks(ranks, _time_all, sizes, block_kib << 10, repeats)
        except RanksFailed as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
    rows = {"ranks": ranks, "block_kib": block_kib, **measured}
    return TypeAdapter(BroadcastFigures).validate_python(rows)


def _time_all(group: KvppGroup, sizes: list[int], block_bytes: int, repeats: int) -> dict[str, Any]:
    """On every rank: time all cases of all sizes."""
    from kvpp_core.calibration import measure_costs
    from kvpp_core.device import CpuDevice

    cost = measure_costs(group, CpuDevice(TIMEOUT_S), "cpu", TIMEOUT_S)
    timings = []
    for mib in sizes:
        pool = _Pool(group, (mib << 20) // block_bytes, block_bytes, cost, repeats)
        timings += [asdict(pool.time(mib, *case)) for case in _cases(pool.num_blocks)]
    return {"costs": str(cost), "timings": timings}


def _cases(num_blocks: int) -> list[tuple[int, bool, tuple[int, ...]]]:
    """Percent of the blocks that are active, whether they are scattered, and the blocks."""
    numbers = random.Random(0)
    cases = []
    for percent in _PERCENT:
        count = max(num_blocks * percent // 100, 1)
        cases.append((percent, False, tuple(range(count))))
        if percent < 100:
            scattered = tuple(sorted(numbers.sample(range(num_blocks), count)))
            cases.append((percent, True, scattered))
    return cases


class _Pool:
    """One layer's cache on every rank; rank 0 is its owner."""

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
        # The owner's bytes are 1, the others' 0: what has arrived can be counted.
        fill = torch.ones if group.rank == 0 else torch.zeros
        self._buffer = fill(layout.size, dtype=torch.int8)
        self._transfer = BundleTransfer(
            layout,
            self._buffer,
            torch.zeros(_STAGING_BYTES, dtype=torch.int8),
            group,
            self._stream,
        )

    def time(
        self, layer_mib: int, percent: int, scattered: bool, blocks: tuple[int, ...]
    ) -> BroadcastTiming:
        """Time every mode in turns.

        Raises:
            RuntimeError: a mode moved other bytes than those of its blocks.
        """
        import torch

        from kvpp_core.history import History
        from kvpp_core.policy import BroadcastPolicy, Mode, choose_mode

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
        auto = choose_mode(
            self._bundle, history, BroadcastPolicy.AUTO, self._cost, _STAGING_BYTES
        ).value
        slowest = {name: partial(_slowest, way, self._group) for name, way in ways.items()}
        turns = interleave(slowest, self._repeats)
        for mode in _MODES:
            self._check(mode, partial(send, mode), len(blocks))
        return BroadcastTiming(
            layer_mib=layer_mib,
            percent=percent,
            scattered=scattered,
            auto=auto,
            full_to_raw=ratio(turns, "full", "raw"),
            runs_to_raw=ratio(turns, "runs", "raw"),
            packed_to_raw=ratio(turns, "packed", "raw"),
            auto_to_raw=ratio(turns, auto, "raw"),
            auto_to_best=spread(turn[auto] / min(turn["full"], turn["packed"]) for turn in turns),
            **medians(turns),
        )

    def _check(self, mode: str, send: Callable[[], None], active: int) -> None:
        """Broadcast once more: all ranks but the owner must receive exactly the mode's blocks."""
        import torch

        if self._group.rank != 0:
            self._buffer.zero_()
        send()
        blocks = self.num_blocks if mode == "full" else active
        if self._group.rank != 0:
            found = int(torch.count_nonzero(self._buffer))
            if found != blocks * self._bundle.bytes_per_block:
                raise RuntimeError(f"{mode}: {found} bytes arrived, expected {blocks} blocks")


def _slowest(way: Callable[[], object], group: KvppGroup) -> float:
    """Seconds of the slowest rank; all ranks begin together."""
    import torch
    import torch.distributed as dist

    dist.barrier(group=group.control)
    started = time.perf_counter()
    way()
    slowest = torch.tensor([time.perf_counter() - started])
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group.control)
    return float(slowest)
