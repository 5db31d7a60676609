"""The demo's engine with KVPP, recorded: reads a job, runs vLLM, writes spans.

python -m benchmarks.trace.traced JOB.json RESULT.json
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kvpp_connectors.demo.engine import start
from kvpp_connectors.demo.prompts import greedy, random_tokens
from kvpp_core.trace import Recording

__all__ = ["RankTrace", "TraceJob", "TraceResult", "main", "run"]


class TraceJob(BaseModel):
    """The engine's options and prompts. Memory in bytes per rank, lengths in tokens."""

    model: str
    broadcast: str
    decode: str
    transfer: dict[str, Any] | None  # kv_transfer_config of a pool; the prompts then come twice
    prompts: int
    prompt_tokens: int
    chunk: int  # prompt tokens that are computed in one step
    answer_tokens: int
    tensor_parallel_size: int
    kv_cache_memory_bytes: int
    kept_steps: int


class RankTrace(BaseModel):
    """One rank's recording, and the exposed waits that its counters added meanwhile, seconds."""

    recording: Recording
    layer_wait_seconds: dict[int, float]


class TraceResult(BaseModel):
    """Traces of all ranks, in order."""

    ranks: list[RankTrace]


def main() -> None:
    """Run the job named on the command line."""
    job = TraceJob.model_validate_json(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(run(job).model_dump_json())


def run(job: TraceJob) -> TraceResult:
    """Start the engine, warm it up, and record it while it answers the prompts."""
    llm = start(
        job.model,
        additional_config={
            "enable_kvpp": True,
            "kvpp": {"broadcast": job.broadcast, "decode": job.decode},
        },
        kv_transfer_config=job.transfer,
        tensor_parallel_size=job.tensor_parallel_size,
        kv_cache_memory_bytes=job.kv_cache_memory_bytes,
        max_num_batched_tokens=job.chunk,
        max_model_len=job.prompt_tokens + job.answer_tokens + 1,
        max_num_seqs=1,
        enable_prefix_caching=True,
    )
    try:
        _answer(llm, job, [0])
        before = llm.collective_rpc("kvpp_stats")
        llm.collective_rpc("kvpp_trace_start", args=(job.kept_steps,))
        _answer(llm, job, range(1, job.prompts + 1))
        after = llm.collective_rpc("kvpp_stats")
        recordings = llm.collective_rpc("kvpp_trace_take")
    finally:
        llm.llm_engine.engine_core.shutdown()
    return TraceResult(
        ranks=[
            RankTrace(recording=recording, layer_wait_seconds=_waits(old, new))
            for recording, old, new in zip(recordings, before, after, strict=True)
        ]
    )


def _answer(llm: Any, job: TraceJob, seeds: Sequence[int]) -> None:
    """Answer a prompt per seed; with a pool a second time, from the pool alone.

    Raises:
        RuntimeError: nothing came from the pool.
    """
    prompts = _Prompts(llm, job)
    computed = prompts.answer(seeds)
    if job.transfer is None:
        return
    if not llm.reset_prefix_cache():
        raise RuntimeError("the engine's own cache could not be emptied: blocks are in use")
    if prompts.answer(seeds) == computed:
        raise RuntimeError("no prompt token came from the pool")


class _Prompts:
    """Sends prompts to the engine, one at a time."""

    def __init__(self, llm: Any, job: TraceJob) -> None:
        self._llm, self._job = llm, job
        self._tokens = 0

    def answer(self, seeds: Sequence[int]) -> int:
        """Answer a prompt per seed and finish its saves; the number of cached tokens."""
        job, engine = self._job, self._llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        sampling = greedy(job.answer_tokens)
        cached = 0
        for seed in seeds:
            prompt = random_tokens(random.Random(seed), job.prompt_tokens)
            engine.add_request(str(seed), {"prompt_token_ids": prompt}, sampling)
            while scheduler.has_requests():
                for out in engine.step():
                    self._tokens += 1
                    print(f"step with token {self._tokens}", flush=True)
                    cached += (out.num_cached_tokens or 0) if out.finished else 0
        return cached


def _waits(before: dict[str, Any], after: dict[str, Any]) -> dict[int, float]:
    """Seconds that two snapshots differ by, by layer."""
    old, new = before["layer_wait_seconds"], after["layer_wait_seconds"]
    return {layer: seconds - old.get(layer, 0.0) for layer, seconds in new.items()}


if __name__ == "__main__":
    main()
