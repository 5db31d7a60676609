"""`benchmarks p2p`: the cost of a pull, against the transfer engine alone and against memcpy.

A child process is the prefill side with real endpoints and a real transfer engine, this process the
decode side. All ways move the same bytes, in turns, in one run; only ratios mean anything. The
order of each turn is random: a way that follows a synchronous batch, whose threads spin, is slower
by a third. docs/performance.md.
"""

from __future__ import annotations

import secrets
from contextlib import closing
from dataclasses import dataclass
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
    whole_numbers,
)
from benchmarks.interleaved import Spread, Way, interleave, medians, one_thread, ratio
from benchmarks.p2p_sides import LAYERS, WINDOW, DecodeRank, Shape, Source
from benchmarks.timeouts import set_long_timeouts

__all__ = ["GroupTiming", "P2pFigures", "P2pTiming", "bench_p2p"]

_SIZES_KIB = (16, 64, 256, 1024)
_PULL_HEADS = (
    *("MB", "blocks of", "case", "raw, GB/s", "pull, GB/s"),
    *("pull / raw", "pull / memcpy"),
)
_GROUP_HEADS = ("blocks of", "case", "MB from prefill", "MB shared", "shared / alone")


@dataclass(frozen=True, slots=True)
class P2pTiming:
    """One rank's pull: median seconds by way, and ratios within a turn."""

    case: str
    block_kib: int
    megabytes: float
    memcpy: float
    raw_windowed: float  # the same reads, submitted one by one within a window
    raw_batch: float  # the same reads in one synchronous batch
    pull: float
    pull_to_raw_goodput: Spread  # relative to the faster raw way
    pull_to_memcpy_goodput: Spread


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """Two decode ranks that need the same bytes: both pull all of them, or they share."""

    case: str
    block_kib: int
    megabytes: float  # on each rank
    alone: float  # seconds until both have everything
    shared: float
    alone_megabytes_from_prefill: float  # over both ranks
    shared_megabytes_from_prefill: float
    shared_to_alone_goodput: Spread


@dataclass(frozen=True, slots=True)
class P2pFigures(Figures):
    """Pulls of one rank, and of a group of two."""

    pulls: list[P2pTiming]
    groups: list[GroupTiming]

    def tables(self) -> list[Table]:
        tables = [
            Table(f"A pull: {LAYERS} layers over tcp on loopback", _PULL_HEADS, self._pull_rows())
        ]
        if self.groups:
            title = f"A group of two: {LAYERS} layers over tcp on loopback"
            tables.append(Table(title, _GROUP_HEADS, self._group_rows()))
        return tables

    def summary(self) -> str:
        return extent("goodput, pull / raw", (t.pull_to_raw_goodput for t in self.pulls))

    def picture(self) -> Picture:
        curves = curves_of(
            (f"{t.megabytes:.0f} MB, {t.case}", t.block_kib, t.pull_to_raw_goodput)
            for t in self.pulls
        )
        title = "A pull over tcp, against the transfer engine alone"
        return Picture(title, "block, KiB", "goodput / raw", curves, log_x=True)

    def _pull_rows(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (
                *(f"{t.megabytes:.0f}", f"{t.block_kib} KiB", t.case),
                f"{t.megabytes / min(t.raw_windowed, t.raw_batch) / 1e3:.2f}",
                f"{t.megabytes / t.pull / 1e3:.2f}",
                *(str(t.pull_to_raw_goodput), f"{t.pull_to_memcpy_goodput.median:.2f}"),
            )
            for t in self.pulls
        )

    def _group_rows(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (
                *(f"{t.block_kib} KiB", t.case, f"{t.alone_megabytes_from_prefill:.0f}"),
                *(f"{t.shared_megabytes_from_prefill:.0f}", str(t.shared_to_alone_goodput)),
            )
            for t in self.groups
        )


def bench_p2p(
    megabytes: Annotated[
        str, typer.Option(help="Sizes of one pull in MiB, separated by commas.")
    ] = "64,256",
    repeats: Annotated[int, typer.Option(min=3, help="Pulls per figure.")] = 15,
    group: Annotated[
        bool, typer.Option(help="Also time two decode ranks, with the first size.")
    ] = True,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Time a pull over tcp on this machine against the same reads without the protocol.

    With --group also the effect of `share_pulls` in a decode group of two.
    """
    sizes = whole_numbers("--megabytes", megabytes)
    conclude("p2p", lambda: _time_all(sizes, repeats, group), as_json, as_markdown)


def _time_all(sizes: list[int], repeats: int, group: bool) -> P2pFigures:
    shapes = [shape for size in sizes for shape in _shapes(size)]
    shared = _shapes(sizes[0]) if group else []
    set_long_timeouts()
    with one_thread(), Source(max(shape.pool_bytes for shape in shapes)) as source:
        return P2pFigures(
            [_time_pull(shape, source, repeats) for shape in shapes],
            [_time_group(shape, source, repeats) for shape in shared],
        )


def _shapes(megabytes: int) -> list[Shape]:
    return [
        Shape(kib << 10, max(1, (megabytes << 20) // (kib << 10) // LAYERS), scattered)
        for kib in _SIZES_KIB
        for scattered in (False, True)
    ]


def _time_pull(shape: Shape, source: Source, repeats: int) -> P2pTiming:
    with closing(DecodeRank(shape)) as rank:
        ways = _pull_ways(shape, source, rank)
        turns = interleave(ways, repeats)
        rank.clear()
        ways["pull"]()
        rank.check()
    seconds = medians(turns)
    raw = min(("raw_windowed", "raw_batch"), key=lambda way: seconds[way])
    return P2pTiming(
        case=_case(shape),
        block_kib=shape.block >> 10,
        megabytes=shape.bytes / 1e6,
        pull_to_raw_goodput=ratio(turns, raw, "pull"),
        pull_to_memcpy_goodput=ratio(turns, "memcpy", "pull"),
        **seconds,
    )


def _pull_ways(shape: Shape, source: Source, rank: DecodeRank) -> dict[str, Way]:
    """All ways to move the bytes, by name."""
    import torch

    from kvpp_connectors.p2p.read_plan import choose_sources, plan_reads
    from kvpp_connectors.p2p.read_window import read_all

    sources = choose_sources(rank.own, [source.use(shape)])
    reads = plan_reads(rank.own.regions, sources, shape.remote, shape.local)
    rows, copy = torch.tensor(shape.remote), rank.caches[0][: shape.blocks].clone()

    def memcpy() -> None:
        for cache in rank.caches:
            torch.index_select(cache, 0, rows, out=copy)

    def raw_windowed() -> None:
        outcome = read_all(rank.engine, reads, WINDOW, lambda: None)
        if outcome.problem is not None:
            raise RuntimeError(outcome.problem)

    def raw_batch() -> None:
        code = rank.engine.raw.batch_transfer_sync_read(
            reads[0].session,
            [read.local for read in reads],
            [read.remote for read in reads],
            [read.size for read in reads],
        )
        if code != 0:
            raise RuntimeError(f"batch_transfer_sync_read returned {code}")

    def pull() -> float:
        rank.start(source.offer())
        return rank.result().seconds

    return {"memcpy": memcpy, "raw_windowed": raw_windowed, "raw_batch": raw_batch, "pull": pull}


def _time_group(shape: Shape, source: Source, repeats: int) -> GroupTiming:
    moved: dict[str, int] = {}
    source.use(shape)
    with (
        closing(DecodeRank(shape, 0, 2)) as first,
        closing(DecodeRank(shape, 1, 2)) as second,
    ):
        ranks = (first, second)
        addresses = [rank.address for rank in ranks]

        def both(name: str, group: bool) -> float:
            offer, ticket = source.offer(), secrets.token_bytes(16)
            for rank in ranks:
                rank.start(offer, ticket, addresses if group else ())
            results = [rank.result() for rank in ranks]
            moved[name] = sum(result.bytes for result in results)
            return max(result.seconds for result in results)

        turns = interleave(
            {"alone": lambda: both("alone", False), "shared": lambda: both("shared", True)},
            repeats,
        )
        for rank in ranks:
            rank.clear()
        both("shared", True)
        for rank in ranks:
            rank.check()
    return GroupTiming(
        case=_case(shape),
        block_kib=shape.block >> 10,
        megabytes=shape.bytes / 1e6,
        alone_megabytes_from_prefill=moved["alone"] / 1e6,
        shared_megabytes_from_prefill=moved["shared"] / 1e6,
        shared_to_alone_goodput=ratio(turns, "alone", "shared"),
        **medians(turns),
    )


def _case(shape: Shape) -> str:
    return "scattered blocks" if shape.scattered else "one run of blocks"
