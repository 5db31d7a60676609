"""`benchmarks capacity`: blocks that fit in the same memory, KVPP off and on, in real engines.

No time is measured: the engines must have exactly as many blocks as `kvpp plan` computes.
docs/performance.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.base import (
    AsJson,
    AsMarkdown,
    Figures,
    Table,
    conclude,
    whole_numbers,
)
from benchmarks.engines import SWITCHES, bare_engine

__all__ = ["Capacity", "CapacityFigures", "bench_capacity"]

_PLAN_S = 300.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """One model: blocks of its engines, and those of its plan."""

    layers: int
    ranks: int
    memory: int  # bytes of KV memory per rank
    block_size: int  # tokens
    off: int  # blocks
    on: int
    planned_off: int
    planned_on: int

    @property
    def is_planned(self) -> bool:
        """Whether the engines have as many blocks as planned."""
        return (self.off, self.on) == (self.planned_off, self.planned_on)


@dataclass(frozen=True, slots=True)
class CapacityFigures(Figures):
    """All models."""

    models: list[Capacity]

    def tables(self) -> list[Table]:
        heads = (
            *("layers", "KV memory, MiB", "blocks off", "blocks on", "on / off"),
            *("planned off", "planned on", "planned on / off"),
        )
        rows = [
            (
                *(str(c.layers), f"{c.memory / 2**20:g}", f"{c.off:,}", f"{c.on:,}"),
                *(f"{c.on / c.off:.3f}", f"{c.planned_off:,}", f"{c.planned_on:,}"),
                f"{c.planned_on / c.planned_off:.3f}",
            )
            for c in self.models
        ]
        first = self.models[0]
        title = (
            f"Capacity of the demo's model, TP{first.ranks}, blocks of {first.block_size} tokens"
        )
        return [Table(title, heads, tuple(rows))]

    def summary(self) -> str:
        ratios = ", ".join(
            f"{c.on / c.off:.3f} of {c.planned_on / c.planned_off:.3f}" for c in self.models
        )
        return f"blocks on / off, found of planned: {ratios}"

    def problems(self) -> list[str]:
        return [
            f"{c.layers} layers: {c.off} blocks off and {c.on} on, `kvpp plan` says "
            f"{c.planned_off} and {c.planned_on}"
            for c in self.models
            if not c.is_planned
        ]


def bench_capacity(
    layers: Annotated[
        str, typer.Option(help="Layers of the demo's model, separated by commas.")
    ] = "12",
    ranks: Annotated[int, typer.Option(min=2, help="Tensor parallel size.")] = 2,
    memory_mib: Annotated[int, typer.Option(min=8, help="KV memory per rank, MiB.")] = 96,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Count the blocks of real engines with the same KV memory, KVPP off and on.

    Exit code 1 if they are not those that `kvpp plan` says.
    """
    counts = whole_numbers("--layers", layers)
    conclude(
        "capacity",
        lambda: CapacityFigures([_count(count, ranks, memory_mib << 20) for count in counts]),
        as_json,
        as_markdown,
    )


def _count(layers: int, ranks: int, memory: int) -> Capacity:
    from kvpp_connectors.demo.model import TinyModel, write_checkpoint

    with tempfile.TemporaryDirectory(prefix="kvpp-bench-") as folder, ExitStack() as stack:
        model = write_checkpoint(Path(folder) / "model", TinyModel(num_hidden_layers=layers))
        # Both start at once: no time is measured.
        engines = {
            way: stack.enter_context(bare_engine(way, _blocks, str(model), ranks, memory))
            for way in SWITCHES
        }
        (off, block_size), (on, _) = (engines[way].call(None) for way in ("off", "on"))
        planned = _plan(model, ranks, memory, block_size)
    return Capacity(
        layers=layers,
        ranks=ranks,
        memory=memory,
        block_size=block_size,
        off=off,
        on=on,
        planned_off=planned["blocks_off"],
        planned_on=planned["blocks_on"],
    )


def _blocks(llm: Any, _: None) -> tuple[int, int]:
    """In the engine's process: number of blocks, tokens per block."""
    cache = llm.llm_engine.vllm_config.cache_config
    return cache.num_gpu_blocks, cache.block_size


def _plan(model: Path, ranks: int, memory: int, block_size: int) -> dict[str, int]:
    """The JSON of `kvpp plan`."""
    options = {"model": model, "tp": ranks, "memory": memory, "block-size": block_size}
    command = [sys.executable, "-m", "kvpp_connectors.cli", "plan", "--json"]
    command += [f"--{name}={value}" for name, value in options.items()]
    ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=_PLAN_S, check=True)
    figures: dict[str, int] = json.loads(ended.stdout)
    return figures
