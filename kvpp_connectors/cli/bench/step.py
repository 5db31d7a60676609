"""`kvpp bench step`: seconds of a prefill chunk and of a decode step, KVPP on against off.

Three engines of two ranks, each in a process of its own: without KVPP, with it, and with it and
decode at the owner. They take turns with one request at each length of history. The model is the
demo's: so small that what KVPP adds to a step shows at its largest. docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpp_connectors.cli.bench.asked_process import AskedProcess, answer_all
from kvpp_connectors.cli.bench.turns import Turns, in_turns, ratio, show

__all__ = ["StepTiming", "bench_step"]

RANKS, CHUNK, DECODES = 2, 512, 16
_ENGINES: Mapping[str, dict[str, Any]] = {
    "off": {"kvpp": {"cpu_profile": True}},
    "broadcast": {"enable_kvpp": True},
    "owner": {"enable_kvpp": True, "kvpp": {"decode": "owner"}},
}
_WAYS = {  # name: engine, and the broadcast policy it is given
    "off": ("off", None),
    "full": ("broadcast", "full"),
    "auto": ("broadcast", "auto"),
    "owner": ("owner", "auto"),
}


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One kind of step behind so many tokens of history."""

    step: str
    context: int
    off: float  # median seconds
    full_to_off: float  # ratios of time
    auto_to_off: float
    owner_to_off: float
    auto_bytes: int  # moved in the group, in one step
    owner_bytes: int


def bench_step(
    contexts: Annotated[
        str, typer.Option(help="Tokens of history, separated by commas.")
    ] = "1024,4096,8192",
    repeats: Annotated[int, typer.Option(min=3, help="Requests per figure.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a table for docs/benchmarks.md.")
    ] = False,
) -> None:
    """Time steps of the demo's model in real engines, KVPP on against off."""
    lengths = [int(context) for context in contexts.split(",")]
    timings = _time_all(lengths, repeats)
    if as_json:
        typer.echo(json.dumps([asdict(timing) for timing in timings], indent=2))
    else:
        show(f"A step of one request, TP{RANKS}: time, KVPP on / off", _rows(timings), markdown)


def _time_all(contexts: list[int], repeats: int) -> list[StepTiming]:
    from kvpp_connectors.demo.model import TinyModel, write_checkpoint

    longest = max(contexts) + DECODES + 1
    with tempfile.TemporaryDirectory(prefix="kvpp-bench-") as folder, ExitStack() as stack:
        shape = TinyModel(max_position_embeddings=longest)
        model = str(write_checkpoint(Path(folder) / "model", shape))
        engines = {
            name: stack.enter_context(
                AskedProcess(f"the engine {name!r}", _serve, model, config, longest)
            )
            for name, config in _ENGINES.items()
        }
        return [timing for context in contexts for timing in _time(engines, context, repeats)]


def _time(engines: Mapping[str, AskedProcess], context: int, repeats: int) -> list[StepTiming]:
    """Both kinds of step; each request gives a figure for both."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in _WAYS}

    def request(way: str) -> None:
        engine, policy = _WAYS[way]
        seen[way].append(engines[engine].ask((context, len(seen[way]), policy)))

    in_turns({way: partial(request, way) for way in _WAYS}, repeats)
    timings = []
    for step in ("prefill", "decode"):
        turns: Turns = [
            {way: seen[way][turn][step] for way in _WAYS} for turn in range(1, repeats + 1)
        ]
        last = {way: seen[way][-1] for way in _WAYS}
        timings.append(
            StepTiming(
                step,
                context,
                statistics.median(turn["off"] for turn in turns),
                **{f"{way}_to_off": 1 / ratio(turns, "off", way) for way in _WAYS if way != "off"},
                auto_bytes=int(last["auto"][f"{step}_bytes"]),
                owner_bytes=int(last["owner"][f"{step}_bytes"]),
            )
        )
    return timings


def _rows(timings: list[StepTiming]) -> list[tuple[str, ...]]:
    heads = (
        *("step", "history", "off, ms", "full / off", "auto / off", "owner / off"),
        *("auto, KiB", "owner, KiB"),
    )
    return [
        heads,
        *(
            (
                *(t.step, str(t.context), f"{t.off * 1e3:.2f}"),
                *(f"{r:.2f}" for r in (t.full_to_off, t.auto_to_off, t.owner_to_off)),
                *(f"{count / 1024:.0f}" for count in (t.auto_bytes, t.owner_bytes)),
            )
            for t in timings
        ),
    ]


def _serve(parent: Connection, model: str, config: dict[str, Any], longest: int) -> None:
    """In the engine's process."""
    from kvpp_connectors.demo.settings import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM's log is no part of the report
    from kvpp_connectors.demo.engine import start

    llm = start(
        model,
        additional_config=config,
        tensor_parallel_size=RANKS,
        kv_cache_memory_bytes=320 << 20,
        max_num_batched_tokens=CHUNK,
        max_model_len=longest,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    answer_all(parent, lambda asked: _measure(llm, *asked))
    llm.llm_engine.engine_core.shutdown()


def _measure(llm: Any, context: int, seed: int, policy: str | None) -> dict[str, float]:
    """The last chunk of a prompt, and the median decode step: seconds, and bytes moved."""
    from vllm import SamplingParams

    if policy is not None:
        llm.collective_rpc("kvpp_set_broadcast", args=(policy,))
    numbers = random.Random(seed)
    prompt = [numbers.randrange(2, 512) for _ in range(context)]
    sampling = SamplingParams(
        temperature=0, max_tokens=DECODES + 1, ignore_eos=True, detokenize=False
    )
    engine, chunks = llm.llm_engine, -(-context // CHUNK)
    engine.add_request("request", {"prompt_token_ids": prompt}, sampling)
    seconds, moved = [], []
    for step in range(chunks + DECODES):
        if step >= chunks - 1:
            moved.append(_moved(llm, policy))
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    moved.append(_moved(llm, policy))
    if engine.has_unfinished_requests():
        raise RuntimeError("the request took more steps than its chunks and its decodes")
    return {
        "prefill": seconds[chunks - 1],
        "decode": statistics.median(seconds[chunks:]),
        "prefill_bytes": moved[1] - moved[0],
        "decode_bytes": moved[-1] - moved[-2],
    }


def _moved(llm: Any, policy: str | None) -> int:
    """Bytes that KVPP has moved in the group."""
    if policy is None:
        return 0
    stats = llm.collective_rpc("kvpp_stats")[0]
    return int(stats["bytes_total"] + stats["exchanged_bytes"])
