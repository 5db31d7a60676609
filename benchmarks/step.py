"""`benchmarks step`: seconds of a prefill chunk and of a decode step, KVPP on against off.

Three engines of two ranks, each in a process of its own: without KVPP, with it, and with it and
decode at the owner. They alternate, one request at each length of history. The demo's model is so
small that KVPP's overhead of a step shows at its largest. docs/performance.md.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

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
from benchmarks.engines import SWITCHES, Engine
from benchmarks.interleaved import Spread, Turns, interleave, ratio
from kvpp_connectors.demo.prompts import greedy, random_tokens

__all__ = ["StepFigures", "StepTiming", "bench_step"]

RANKS, CHUNK, DECODES = 2, 512, 16
_STEPS = ("prefill", "decode")
_ENGINES: Mapping[str, dict[str, Any]] = {
    "off": SWITCHES["off"],
    "broadcast": SWITCHES["on"],
    "owner": SWITCHES["on"] | {"kvpp": {"decode": "owner"}},
}
_WAYS = {  # name: engine, and its broadcast policy
    "off": ("off", None),
    "full": ("broadcast", "full"),
    "auto": ("broadcast", "auto"),
    "owner": ("owner", "auto"),
}


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One kind of step, behind ``context`` tokens of history."""

    step: str
    context: int
    off: float  # median seconds
    full_to_off: Spread  # ratios of time
    auto_to_off: Spread
    owner_to_off: Spread
    auto_bytes: int  # moved in the group, in one step
    owner_bytes: int
    equal: bool  # all ways answer with the same tokens


@dataclass(frozen=True, slots=True)
class StepFigures(Figures):
    """Both kinds of step at every length of history."""

    timings: list[StepTiming]

    def tables(self) -> list[Table]:
        heads = (
            *("step", "history", "off, ms", "full / off", "auto / off", "owner / off"),
            *("auto, KiB", "owner, KiB"),
        )
        rows = [
            (
                *(t.step, str(t.context), f"{t.off * 1e3:.2f}"),
                *(str(r) for r in (t.full_to_off, t.auto_to_off, t.owner_to_off)),
                *(f"{count / 1024:.0f}" for count in (t.auto_bytes, t.owner_bytes)),
            )
            for t in self.timings
        ]
        return [Table(f"A step of one request, TP{RANKS}: time on / off", heads, tuple(rows))]

    def summary(self) -> str:
        auto = [
            extent(f"{step}, auto / off", (t.auto_to_off for t in self.timings if t.step == step))
            for step in _STEPS
        ]
        owner = (t.owner_to_off for t in self.timings if t.step == "decode")
        return "; ".join((*auto, extent("decode, owner / off", owner)))

    def picture(self) -> Picture:
        curves = curves_of(
            (f"{t.step}, {way}", t.context, ratio)
            for t in self.timings
            for way, ratio in (("auto", t.auto_to_off), ("owner", t.owner_to_off))
        )
        return Picture("A step with KVPP on", "tokens of history", "time on / off", curves)

    def problems(self) -> list[str]:
        return [
            f"behind {t.context} tokens of history the tokens with KVPP on are not those of off"
            for t in self.timings
            if t.step == "decode" and not t.equal
        ]


def bench_step(
    contexts: Annotated[
        str, typer.Option(help="Tokens of history, separated by commas.")
    ] = "2048,8192",
    repeats: Annotated[int, typer.Option(min=3, help="Requests per figure.")] = 5,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Time steps of the demo's model in real engines, KVPP on against off.

    Exit code 1 if an engine with KVPP answers with other tokens than the one without.
    """
    lengths = whole_numbers("--contexts", contexts)
    conclude("step", lambda: StepFigures(_time_all(lengths, repeats)), as_json, as_markdown)


def _time_all(contexts: list[int], repeats: int) -> list[StepTiming]:
    from kvpp_connectors.demo.model import TinyModel, write_checkpoint

    longest = max(contexts) + DECODES + 1
    with tempfile.TemporaryDirectory(prefix="kvpp-bench-") as folder, ExitStack() as stack:
        shape = TinyModel(max_position_embeddings=longest)
        model = str(write_checkpoint(Path(folder) / "model", shape))
        options: dict[str, Any] = {
            "tensor_parallel_size": RANKS,
            "kv_cache_memory_bytes": 320 << 20,
            "max_num_batched_tokens": CHUNK,
            "max_model_len": longest,
            "max_num_seqs": 1,
            "enable_prefix_caching": False,
        }
        engines = {
            name: stack.enter_context(
                Engine(f"the engine {name!r}", _measure, model, additional_config=config, **options)
            )
            for name, config in _ENGINES.items()
        }
        return [timing for context in contexts for timing in _time(engines, context, repeats)]


def _time(engines: Mapping[str, Engine], context: int, repeats: int) -> list[StepTiming]:
    """Time both kinds of step; each request has both."""
    seen: dict[str, list[_Seen]] = {name: [] for name in _WAYS}

    def request(way: str) -> None:
        engine, policy = _WAYS[way]
        seen[way].append(engines[engine].call((context, len(seen[way]), policy)))

    interleave({way: partial(request, way) for way in _WAYS}, repeats)
    equal = all(
        seen[way][turn].tokens == seen["off"][turn].tokens
        for way in _WAYS
        for turn in range(repeats + 1)
    )
    last = {way: seen[way][-1] for way in _WAYS}
    timings = []
    for step in _STEPS:
        turns: Turns = [
            {way: seen[way][turn].seconds[step] for way in _WAYS} for turn in range(1, repeats + 1)
        ]
        timings.append(
            StepTiming(
                step,
                context,
                statistics.median(turn["off"] for turn in turns),
                **{f"{way}_to_off": ratio(turns, way, "off") for way in _WAYS if way != "off"},
                auto_bytes=last["auto"].moved[step],
                owner_bytes=last["owner"].moved[step],
                equal=equal,
            )
        )
    return timings


@dataclass(frozen=True, slots=True)
class _Seen:
    """One request, by kind of step."""

    seconds: dict[str, float]
    moved: dict[str, int]  # bytes, in one step
    tokens: list[int]  # of the answer


def _measure(llm: Any, request: tuple[int, int, str | None]) -> _Seen:
    """In the engine's process: time the last chunk of a prompt, and the median decode step."""
    context, seed, policy = request
    if policy is not None:
        llm.collective_rpc("kvpp_set_broadcast", args=(policy,))
    prompt = random_tokens(random.Random(seed), context)
    engine, chunks = llm.llm_engine, -(-context // CHUNK)
    engine.add_request("request", {"prompt_token_ids": prompt}, greedy(DECODES + 1))
    seconds, moved = [], []
    outputs: list[Any] = []
    for step in range(chunks + DECODES):
        if step >= chunks - 1:
            moved.append(_moved(llm, policy))
        started = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - started)
    moved.append(_moved(llm, policy))
    if engine.has_unfinished_requests():
        raise RuntimeError("the request took more steps than its chunks and its decodes")
    [answer] = outputs[-1].outputs
    return _Seen(
        {"prefill": seconds[chunks - 1], "decode": statistics.median(seconds[chunks:])},
        {"prefill": moved[1] - moved[0], "decode": moved[-1] - moved[-2]},
        list(answer.token_ids),
    )


def _moved(llm: Any, policy: str | None) -> int:
    """Bytes that KVPP has moved in the group so far."""
    if policy is None:
        return 0
    stats = llm.collective_rpc("kvpp_stats")[0]
    return int(stats["bytes_total"] + stats["exchanged_bytes"])
