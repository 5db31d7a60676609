"""One engine of the demo in a process of its own: reads a job, runs vLLM, writes a result.

python -m kvpp_connectors.demo.engine JOB.json RESULT.json
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kvpp_connectors.demo.prompts import greedy

__all__ = ["EngineResult", "Job", "Wave", "main", "start"]


class Job(BaseModel):
    """The engine's options and prompts. Memory in bytes per rank, lengths in tokens."""

    model: str
    additional_config: dict[str, Any]
    prompts: list[list[int]]
    tensor_parallel_size: int
    kv_cache_memory_bytes: int
    max_num_batched_tokens: int
    max_model_len: int
    max_tokens: int
    broadcasts: list[str] = []  # policies: one more wave for each, KVPP on


class Wave(BaseModel):
    """One pass over all prompts: answers, hits, times and counters."""

    tokens: list[list[int]]
    logprobs: list[list[float]]  # of the chosen tokens
    cached_tokens: int
    steps: int
    median_step_s: float
    stats: dict[str, Any] | None  # what this wave added to the counters; None without KVPP


class EngineResult(BaseModel):
    """Capacity and layouts of an engine, and its waves by name."""

    capacity_blocks: int
    block_size: int
    layouts: list[dict[str, Any]]  # by rank, empty without KVPP
    waves: dict[str, Wave]


def main() -> None:
    """Run the job named on the command line."""
    job = Job.model_validate_json(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(run(job).model_dump_json())


def run(job: Job) -> EngineResult:
    """Start the engine and send the prompts in waves."""
    llm = start(
        job.model,
        additional_config=job.additional_config,
        tensor_parallel_size=job.tensor_parallel_size,
        kv_cache_memory_bytes=job.kv_cache_memory_bytes,
        max_num_batched_tokens=job.max_num_batched_tokens,
        max_model_len=job.max_model_len,
        max_num_seqs=min(len(job.prompts), job.max_num_batched_tokens),
    )
    with_kvpp = bool(job.additional_config.get("enable_kvpp"))
    waves = {"first": _wave(llm, job, with_kvpp)}
    waves["second"] = _wave(llm, job, with_kvpp)
    for broadcast in job.broadcasts:
        llm.collective_rpc("kvpp_set_broadcast", args=(broadcast,))
        waves[broadcast] = _wave(llm, job, with_kvpp)
    cache = llm.llm_engine.vllm_config.cache_config
    return EngineResult(
        capacity_blocks=cache.num_gpu_blocks,
        block_size=cache.block_size,
        layouts=llm.collective_rpc("kvpp_layout") if with_kvpp else [],
        waves=waves,
    )


def start(model: str, **options: Any) -> Any:
    """A vLLM engine of the demo's model on CPU, whose steps this process runs one by one."""
    # With the engine core in this process the caller runs each step, so that two engines with the
    # same prompts schedule alike.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    return LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        attention_backend="CPU_MLA",
        **options,
    )


def _wave(llm: Any, job: Job, with_kvpp: bool) -> Wave:
    before = _stats(llm) if with_kvpp else {}
    sampling = greedy(job.max_tokens, logprobs=1)
    for number, prompt in enumerate(job.prompts):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    finished: dict[int, Any] = {}
    seconds = []
    while llm.llm_engine.has_unfinished_requests():
        started = time.perf_counter()
        outputs = llm.llm_engine.step()
        seconds.append(time.perf_counter() - started)
        finished.update({int(out.request_id): out for out in outputs if out.finished})
        print(f"step {len(seconds)}, {len(finished)} of {len(job.prompts)} requests", flush=True)
    answers = [finished[number].outputs[0] for number in range(len(job.prompts))]
    return Wave(
        tokens=[list(answer.token_ids) for answer in answers],
        logprobs=[
            [entry[token].logprob for token, entry in zip(a.token_ids, a.logprobs, strict=True)]
            for a in answers
        ],
        cached_tokens=sum(out.num_cached_tokens or 0 for out in finished.values()),
        steps=len(seconds),
        median_step_s=statistics.median(seconds),
        stats=_difference(before, _stats(llm)) if with_kvpp else None,
    )


def _stats(llm: Any) -> dict[str, Any]:
    """Rank 0's counters; the other ranks of the group count the same."""
    counters: dict[str, Any] = llm.collective_rpc("kvpp_stats")[0]
    return counters


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Counters added between two snapshots."""
    return {
        name: _difference(before.get(name, {}), value)
        if isinstance(value, dict)
        else value - before.get(name, 0)
        for name, value in after.items()
    }


if __name__ == "__main__":
    main()
