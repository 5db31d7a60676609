"""`kvpp demo`: the same prompts with KVPP off and on, in real vLLM engines on this machine."""

from __future__ import annotations

import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvpp_connectors.cli.children import ChildFailed, run_module
from kvpp_connectors.cli.demo_engine import Job, Result, Wave
from kvpp_connectors.cli.demo_model import TinyModel, write_checkpoint
from kvpp_connectors.cli.demo_oracle import OracleResult, Questions

__all__ = ["demo"]

_LOGPROB_BOUND = 1e-3  # distance to transformers, float32
_FAMILIES, _PER_FAMILY, _SHARED, _OWN = 2, 3, 96, 54  # prompts and their tokens
_MAX_TOKENS, _TOKEN_BUDGET = 24, 64
_BROADCASTS = ("full", "runs", "packed")
# Small models on few cores: one thread a rank, no warm-up.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the table; ``ok`` is None for a figure that cannot be wrong."""

    name: str
    off: str
    on: str
    ok: bool | None = None


@dataclass(frozen=True, slots=True)
class _Run:
    """Both engines and the oracle's answers."""

    memory: int
    off: Result
    on: Result
    oracle: list[list[float]]


def demo(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the tiny model.")] = 12,
    tp: Annotated[int, typer.Option(min=2, help="Tensor-parallel size.")] = 2,
    memory_mib: Annotated[int, typer.Option(min=8, help="KV memory per rank, in MiB.")] = 96,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for logs and results; kept.", show_default="temp")
    ] = None,
) -> None:
    """Run the same prompts with KVPP off and on, under the same KV memory, and compare.

    Writes a tiny DeepSeek-V2 checkpoint that is sensitive to its KV cache, sends prompts with
    shared prefixes that are longer than the token budget (so that chunked prefill and prefix hits
    happen) through a real vLLM engine on CPU without and with KVPP, asks transformers for the same
    logits, and prints one table. Exit code 1 if anything is unequal.
    """
    # A plain SIGTERM would end this process without stopping the engines, which have sessions of
    # their own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="kvpp-demo-")) if logs is None else logs
    folder.mkdir(parents=True, exist_ok=True)
    console.print(f"KVPP demo: {layers} layers, TP {tp}, {memory_mib} MiB of KV memory per rank")
    started = time.monotonic()
    try:
        run = _run(folder, TinyModel(num_hidden_layers=layers), tp, memory_mib << 20, console)
    except ChildFailed as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        raise typer.Exit(1) from error
    rows = _rows(run)
    console.print(_table(rows))
    shutil.rmtree(folder / "model", ignore_errors=True)
    console.print(f"{time.monotonic() - started:.0f} s; logs and results in {folder}")
    wrong = [row.name for row in rows if row.ok is False]
    if wrong:
        console.print(f"[red]NOT EQUAL: {', '.join(wrong)}[/red]")
        raise typer.Exit(1)
    console.print("[green]All equal.[/green]")


def _run(folder: Path, shape: TinyModel, tp: int, memory: int, console: Console) -> _Run:
    model = write_checkpoint(folder / "model", shape)
    prompts = _prompts(shape.vocab_size)
    off = Job(
        model=str(model),
        additional_config={"kvpp": {"cpu_profile": True}},
        prompts=prompts,
        tensor_parallel_size=tp,
        kv_cache_memory_bytes=memory,
        max_num_batched_tokens=_TOKEN_BUDGET,
        max_tokens=_MAX_TOKENS,
    )
    on = off.model_copy(
        update={"additional_config": {"enable_kvpp": True}, "broadcasts": list(_BROADCASTS)}
    )
    results = {}
    for name, job in (("off", off), ("on", on)):
        source, target = folder / f"{name}-job.json", folder / f"{name}-result.json"
        source.write_text(job.model_dump_json())
        run_module(
            "kvpp_connectors.cli.demo_engine",
            [str(source), str(target)],
            title=f"engine with KVPP {name}",
            log=folder / f"{name}.log",
            environment=_ENVIRONMENT,
            console=console,
        )
        results[name] = Result.model_validate_json(target.read_text())
        console.print(f"engine with KVPP {name}: done")
    oracle = _ask_oracle(folder, model, prompts, results["off"].waves["first"], console)
    return _Run(memory, results["off"], results["on"], oracle)


def _ask_oracle(
    folder: Path, model: Path, prompts: list[list[int]], wave: Wave, console: Console
) -> list[list[float]]:
    source, target = folder / "oracle-questions.json", folder / "oracle-result.json"
    source.write_text(Questions(prompts=prompts, answers=wave.tokens).model_dump_json())
    run_module(
        "kvpp_connectors.cli.demo_oracle",
        [str(model), str(source), str(target)],
        title="transformers",
        log=folder / "oracle.log",
        environment=_ENVIRONMENT,
        console=console,
    )
    console.print("transformers: done")
    return OracleResult.model_validate_json(target.read_text()).logprobs


def _prompts(vocabulary: int) -> list[list[int]]:
    """Families of prompts that share their first tokens; each longer than the token budget."""
    numbers = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [numbers.randrange(2, vocabulary) for _ in range(count)]

    families = [tokens(_SHARED) for _ in range(_FAMILIES)]
    return [shared + tokens(_OWN) for shared in families for _ in range(_PER_FAMILY)]


def _rows(run: _Run) -> list[_Row]:
    return [*_capacity_rows(run), *_answer_rows(run), *_traffic_rows(run)]


def _capacity_rows(run: _Run) -> list[_Row]:
    off, on = run.off, run.on
    worst = max(layout["physical_bytes_per_block"] for layout in on.layouts)
    logical = on.layouts[0]["logical_bytes_per_block"]
    fits = all(
        layout["allocated_bytes"] == on.capacity_blocks * layout["physical_bytes_per_block"]
        and layout["allocated_bytes"] <= run.memory
        for layout in on.layouts
    )
    return [
        _Row(
            "capacity, tokens",
            f"{off.capacity_blocks * off.block_size:,}",
            f"{on.capacity_blocks * on.block_size:,}",
            off.capacity_blocks == run.memory // logical
            and on.capacity_blocks == run.memory // worst,
        ),
        _Row(
            "capacity on / off (the formula's in brackets)",
            "1",
            f"{on.capacity_blocks / off.capacity_blocks:.3f} ({logical / worst:.3f})",
        ),
        _Row(
            "KV bytes allocated, largest rank",
            f"{off.capacity_blocks * logical:,}",
            f"{max(layout['allocated_bytes'] for layout in on.layouts):,}",
            fits,
        ),
    ]


def _answer_rows(run: _Run) -> list[_Row]:
    off, on = run.off.waves, run.on.waves
    waves = [
        (name, off["first" if name == "first" else "second"], wave) for name, wave in on.items()
    ]
    distances = [_distance(waves["first"].logprobs, run.oracle) for waves in (off, on)]
    hits = [f"{w['first'].cached_tokens} and {w['second'].cached_tokens}" for w in (off, on)]
    tokens = all(a.tokens == b.tokens for _, a, b in waves)
    logprobs = all(a.logprobs == b.logprobs for _, a, b in waves)
    return [
        _Row(
            f"tokens equal, {len(waves)} waves",
            "",
            _yes(tokens),
            tokens,
        ),
        _Row(
            "logprobs equal to the last bit",
            "",
            _yes(logprobs),
            logprobs,
        ),
        _Row(
            f"largest logprob distance to transformers (bound {_LOGPROB_BOUND:g})",
            f"{distances[0]:.1e}",
            f"{distances[1]:.1e}",
            max(distances) <= _LOGPROB_BOUND,
        ),
        _Row(
            "prefix hits in wave 1 and 2, tokens",
            hits[0],
            hits[1],
            on["second"].cached_tokens == off["second"].cached_tokens > 0,
        ),
    ]


def _traffic_rows(run: _Run) -> list[_Row]:
    off, on = run.off.waves, run.on.waves
    rows = [
        _Row(
            f"broadcast {name}: MB moved / MB of active history (broadcasts)",
            "",
            f"{wave.stats['bytes_total'] / 1e6:.1f} / "
            f"{wave.stats['active_history_bytes'] / 1e6:.1f} "
            f"({sum(wave.stats['broadcasts'].values())})",
            ok=_traffic_is_right(name, wave.stats),
        )
        for name, wave in (("auto", on["second"]), *((b, on[b]) for b in _BROADCASTS))
        if wave.stats is not None
    ]
    second = on["second"]
    times = (off["second"].median_step_s * 1e3, second.median_step_s * 1e3)
    waited = (second.stats or {}).get("wait_seconds", 0.0) / second.steps * 1e3
    rows += [
        _Row(
            f"median step of wave 2, ms ({second.steps} steps)",
            f"{times[0]:.1f}",
            f"{times[1]:.1f} ({times[1] / times[0]:.2f}x)",
        ),
        _Row("of it waiting for broadcasts, ms (mean)", "", f"{waited:.1f}"),
    ]
    return rows


def _traffic_is_right(name: str, stats: dict[str, float]) -> bool:
    moved, active, full = (
        stats[key] for key in ("bytes_total", "active_history_bytes", "full_bytes")
    )
    return moved == full > 0 if name == "full" else 0 < moved <= min(1.05 * active, full)


def _distance(left: list[list[float]], right: list[list[float]]) -> float:
    pairs = zip(left, right, strict=True)
    return max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _table(rows: list[_Row]) -> Table:
    table = Table("", "KVPP off", "KVPP on", "check")
    for row in rows:
        mark = {None: "", True: "[green]ok[/green]", False: "[red]WRONG[/red]"}[row.ok]
        table.add_row(row.name, row.off, row.on, mark)
    return table
