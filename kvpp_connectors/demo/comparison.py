"""KVPP off and on in real engines, beside transformers: the first table of the demo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpp_connectors.demo.children import run_module
from kvpp_connectors.demo.engine import EngineResult, Job, Wave
from kvpp_connectors.demo.oracle import OracleResult, Questions
from kvpp_connectors.demo.report import Row
from kvpp_connectors.demo.settings import DemoSettings

__all__ = ["Comparison", "compare", "run_plain"]

_LOGPROB_BOUND = 1e-3  # largest difference to transformers' logprobs, float32
_BROADCASTS = ("full", "runs", "packed")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of both engines, and the oracle's logprobs of KVPP off's answers."""

    memory: int  # bytes of KV memory per rank
    off: EngineResult
    on: EngineResult
    oracle: list[list[float]]

    def rows(self) -> list[Row]:
        """The table: columns KVPP off and KVPP on."""
        return [*_capacity_rows(self), *_answer_rows(self), *_traffic_rows(self)]


def run_plain(settings: DemoSettings, prompts: list[list[int]]) -> EngineResult:
    """Run the engine without KVPP.

    Raises:
        ChildFailed: it failed.
    """
    return _run_engine(settings, "off", _plain_job(settings, prompts))


def compare(settings: DemoSettings, off: EngineResult) -> Comparison:
    """Run the engine with KVPP and the oracle, and compare them with ``off``.

    Raises:
        ChildFailed: one of them failed.
    """
    job = _plain_job(settings, settings.prompts()).model_copy(
        update={"additional_config": {"enable_kvpp": True}, "broadcasts": list(_BROADCASTS)}
    )
    on = _run_engine(settings, "on", job)
    return Comparison(settings.memory, off, on, _ask_oracle(settings, off.waves["first"]))


def _plain_job(settings: DemoSettings, prompts: list[list[int]]) -> Job:
    return Job(
        model=str(settings.model),
        additional_config={"kvpp": {"cpu_profile": True}},
        prompts=prompts,
        tensor_parallel_size=settings.tensor_parallel_size,
        kv_cache_memory_bytes=settings.memory,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        max_tokens=settings.max_tokens,
    )


def _run_engine(settings: DemoSettings, name: str, job: Job) -> EngineResult:
    source, target = (settings.folder / f"{name}-{end}.json" for end in ("job", "result"))
    source.write_text(job.model_dump_json())
    run_module(
        "kvpp_connectors.demo.engine",
        [str(source), str(target)],
        title=f"engine with KVPP {name}",
        log=settings.folder / f"{name}.log",
        environment=settings.environment,
        console=settings.console,
    )
    settings.console.print(f"engine with KVPP {name}: done")
    return EngineResult.model_validate_json(target.read_text())


def _ask_oracle(settings: DemoSettings, wave: Wave) -> list[list[float]]:
    source, target = (settings.folder / f"oracle-{end}.json" for end in ("questions", "result"))
    questions = Questions(prompts=settings.prompts(), answers=wave.tokens)
    source.write_text(questions.model_dump_json())
    run_module(
        "kvpp_connectors.demo.oracle",
        [str(settings.model), str(source), str(target)],
        title="transformers",
        log=settings.folder / "oracle.log",
        environment=settings.environment,
        console=settings.console,
    )
    settings.console.print("transformers: done")
    return OracleResult.model_validate_json(target.read_text()).logprobs


def _capacity_rows(run: Comparison) -> list[Row]:
    off, on = run.off, run.on
    worst = max(layout["physical_bytes_per_block"] for layout in on.layouts)
    logical = on.layouts[0]["logical_bytes_per_block"]
    fits = all(
        layout["allocated_bytes"] == on.capacity_blocks * layout["physical_bytes_per_block"]
        and layout["allocated_bytes"] <= run.memory
        for layout in on.layouts
    )
    tokens = [f"{result.capacity_blocks * result.block_size:,}" for result in (off, on)]
    blocks = run.memory // logical, run.memory // worst
    ratio = f"{on.capacity_blocks / off.capacity_blocks:.3f} ({logical / worst:.3f})"
    allocated = max(layout["allocated_bytes"] for layout in on.layouts)
    return [
        Row(
            "capacity, tokens",
            (tokens[0], tokens[1]),
            (off.capacity_blocks, on.capacity_blocks) == blocks,
        ),
        Row("capacity on / off (the formula's in brackets)", ("1", ratio)),
        Row(
            "KV bytes allocated, largest rank",
            (f"{off.capacity_blocks * logical:,}", f"{allocated:,}"),
            fits,
        ),
    ]


def _answer_rows(run: Comparison) -> list[Row]:
    off, on = run.off.waves, run.on.waves
    waves = [(off["first" if name == "first" else "second"], wave) for name, wave in on.items()]
    distances = [_distance(waves["first"].logprobs, run.oracle) for waves in (off, on)]
    hits = [f"{w['first'].cached_tokens} and {w['second'].cached_tokens}" for w in (off, on)]
    tokens = all(a.tokens == b.tokens for a, b in waves)
    logprobs = all(a.logprobs == b.logprobs for a, b in waves)
    return [
        Row(f"tokens equal, {len(waves)} waves", ("", _yes(tokens)), tokens),
        Row("logprobs equal to the last bit", ("", _yes(logprobs)), logprobs),
        Row(
            f"largest logprob distance to transformers (bound {_LOGPROB_BOUND:g})",
            (f"{distances[0]:.1e}", f"{distances[1]:.1e}"),
            max(distances) <= _LOGPROB_BOUND,
        ),
        Row(
            "prefix hits in wave 1 and 2, tokens",
            (hits[0], hits[1]),
            on["second"].cached_tokens == off["second"].cached_tokens > 0,
        ),
    ]


def _traffic_rows(run: Comparison) -> list[Row]:
    off, on = run.off.waves, run.on.waves
    named = (("auto", on["second"]), *((b, on[b]) for b in _BROADCASTS))
    rows = [_broadcast_row(name, wave.stats) for name, wave in named if wave.stats is not None]
    second = on["second"]
    times = (off["second"].median_step_s * 1e3, second.median_step_s * 1e3)
    waited = (second.stats or {}).get("wait_seconds", 0.0) / second.steps * 1e3
    return [
        *rows,
        Row(
            f"median step of wave 2, ms ({second.steps} steps)",
            (f"{times[0]:.1f}", f"{times[1]:.1f} ({times[1] / times[0]:.2f}x)"),
        ),
        Row("of it waiting for broadcasts, ms (mean)", ("", f"{waited:.1f}")),
    ]


def _broadcast_row(name: str, stats: Mapping[str, Any]) -> Row:
    moved, active, full = (
        stats[key] for key in ("bytes_total", "active_history_bytes", "full_bytes")
    )
    count = sum(stats["broadcasts"].values())
    return Row(
        f"broadcast {name}: MB moved / MB of active history (broadcasts)",
        ("", f"{moved / 1e6:.1f} / {active / 1e6:.1f} ({count})"),
        moved == full > 0 if name == "full" else 0 < moved <= min(1.05 * active, full),
    )


def _distance(left: list[list[float]], right: list[list[float]]) -> float:
    pairs = zip(left, right, strict=True)
    return max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
