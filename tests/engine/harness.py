"""A real vLLM engine under a script: requests that arrive, are aborted, and answers to compare."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fork_server import forked_workers

__all__ = [
    "Answer",
    "Engine",
    "Request",
    "Script",
    "Trace",
    "kvpp_off",
    "kvpp_on",
    "random_tokens",
    "recorded_schedule",
    "start_engine",
]

VOCABULARY = 512
SCRIPT_BOUND_S = 300.0  # a script that is not done by then hangs; steps that wait may be many
EXTENSION = "tests.engine.faults.WorkerFaults"


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt (token ids), when it arrives (before which step), and when it is aborted."""

    prompt: tuple[int, ...]
    max_tokens: int = 8
    arrives: int = 0
    aborted: int | None = None
    priority: int = 0  # lower is served first, where the engine schedules by priority


@dataclass(frozen=True, slots=True)
class Script:
    """Requests in the order in which they are sent."""

    requests: tuple[Request, ...]


@dataclass(slots=True)
class Answer:
    """What came back for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str | None = None


@dataclass(slots=True)
class Trace:
    """The answers of a script, and the schedule that led to them."""

    answers: list[Answer]
    schedule: list[list[tuple[int, int]]]  # per step: (request number, tokens scheduled)
    preemptions: int  # how often a preempted request was taken up again
    dummy_steps: int = 0  # steps of a data-parallel replica that had no work of its own
    accepted_drafts: int = 0  # tokens that an answer got in one step, beyond its first


def kvpp_on(**options: Any) -> dict[str, Any]:
    """additional_config with KVPP on and scratch poisoned, so that a missing broadcast shows."""
    return {"enable_kvpp": True, "kvpp": {"poison_scratch": True, **options}}


def kvpp_off() -> dict[str, Any]:
    """additional_config of the engine to compare with: the CPU profile alone."""
    return {"kvpp": {"cpu_profile": True}}


def random_tokens(seed: int, count: int) -> tuple[int, ...]:
    """``count`` token ids that depend on ``seed`` alone."""
    numbers = random.Random(seed)
    return tuple(numbers.randrange(2, VOCABULARY) for _ in range(count))


class Engine:
    """An LLM whose steps the test drives."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._scripts = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that the engine serves with."""
        return int(self._llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)

    @property
    def vllm_config(self) -> Any:
        """The engine's configuration."""
        return self._llm.llm_engine.vllm_config

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; the answers by rank."""
        answers: list[Any] = self._llm.collective_rpc(method, args=args)
        return answers

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, so that a script starts from nothing."""
        assert self._llm.reset_prefix_cache()

    def first_block(self) -> int:
        """The id of the first block of the oldest running request."""
        request = self._scheduler.running[0]
        return int(self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][0])

    def cached_blocks(self, prompt: tuple[int, ...]) -> dict[bytes, int]:
        """The whole blocks of a prompt that the engine keeps: vLLM's hash of each, and its id."""
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import hash_block_tokens

        pool = self._scheduler.kv_cache_manager.block_pool
        size = self.vllm_config.cache_config.block_size
        found: dict[bytes, int] = {}
        parent = None
        for end in range(size, len(prompt) + 1, size):
            parent = hash_block_tokens(sha256, parent, prompt[end - size : end])
            (block,) = pool.get_cached_block(parent, [0])
            found[bytes(parent)] = int(block.block_id)
        return found

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds; cached ones count as free."""
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def run(
        self, script: Script, at_step: Mapping[int, Callable[[Engine], object]] | None = None
    ) -> Trace:
        """Run a script to its end; ``at_step`` is called before the given steps."""
        self._scripts += 1
        engine = self._llm.llm_engine
        ids = {f"{self._scripts}-{n}": n for n in range(len(script.requests))}
        trace = Trace([Answer() for _ in script.requests], [], 0)
        deadline = time.monotonic() + SCRIPT_BOUND_S
        for step in itertools.count():
            assert time.monotonic() < deadline, f"the script did not end in {SCRIPT_BOUND_S} s"
            if at_step is not None and step in at_step:
                at_step[step](self)
            self._arrivals(script, step, ids)
            if not engine.has_unfinished_requests():
                if all(request.arrives < step for request in script.requests):
                    break
                continue
            with recorded_schedule(self._scheduler) as outputs:
                results = engine.step()
            trace.dummy_steps += not outputs
            for output in outputs:
                trace.schedule.append(_read_schedule(output, ids))
                trace.preemptions += len(output.scheduled_cached_reqs.resumed_req_ids)
            for result in results:
                answer = trace.answers[ids[result.request_id]]
                known = len(answer.tokens)
                _read_answer(answer, result)
                trace.accepted_drafts += max(len(answer.tokens) - known - 1, 0)
        return trace

    def settle(self) -> None:
        """Tell the workers of the last requests that ended: a step without tokens."""
        self._llm.llm_engine.step()

    def drain(self, seconds: float = 120, step: Callable[[], object] | None = None) -> None:
        """Step until no request is held any more, not even one whose blocks are being saved.

        ``step`` is taken in place of the engine's own.
        """
        step = step or self._llm.llm_engine.step
        deadline = time.monotonic() + seconds
        while self._scheduler.has_requests():
            assert time.monotonic() < deadline, f"still held: {list(self._scheduler.requests)}"
            step()

    def stop(self) -> None:
        """End the workers."""
        self._llm.llm_engine.engine_core.shutdown()
        gc.collect()

    @property
    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def _arrivals(self, script: Script, step: int, ids: Mapping[str, int]) -> None:
        from vllm import SamplingParams

        for name, number in ids.items():
            request = script.requests[number]
            if request.arrives == step:
                sampling = SamplingParams(
                    temperature=0,
                    max_tokens=request.max_tokens,
                    ignore_eos=True,
                    logprobs=1,
                    detokenize=False,
                )
                self._llm.llm_engine.add_request(
                    name,
                    {"prompt_token_ids": list(request.prompt)},
                    sampling,
                    priority=request.priority,
                )
            if request.aborted == step:
                self._llm.llm_engine.abort_request([name])


@contextmanager
def start_engine(
    model: Path,
    additional_config: dict[str, Any],
    *,
    tp: int = 2,
    blocks: int | None = None,
    memory: int = 64 << 20,
    **options: Any,
) -> Iterator[Engine]:
    """Start an engine with ``memory`` bytes of KV memory per rank, or ``blocks`` blocks of it."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "worker_extension_cls": EXTENSION,
        "enforce_eager": True,
        "attention_backend": "CPU_MLA",
        **options,
    }
    with forked_workers():
        llm = LLM(
            str(model),
            additional_config=additional_config,
            tensor_parallel_size=tp,
            kv_cache_memory_bytes=memory,
            num_gpu_blocks_override=blocks,
            skip_tokenizer_init=True,
            seed=0,
            **settings,
        )
    engine = Engine(llm)
    try:
        yield engine
    finally:
        engine.stop()


@contextmanager
def recorded_schedule(scheduler: Any) -> Iterator[list[Any]]:
    """Keep what the scheduler decides while the block runs."""
    outputs: list[Any] = []
    original = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        outputs.append(output)
        return output

    scheduler.schedule = schedule
    try:
        yield outputs
    finally:
        scheduler.schedule = original


def _read_schedule(output: Any, ids: Mapping[str, int]) -> list[tuple[int, int]]:
    """(request number, tokens), whatever suffix the engine gave the request ids."""
    return sorted(
        (number, tokens)
        for request_id, tokens in output.num_scheduled_tokens.items()
        for name, number in ids.items()
        if request_id == name or request_id.startswith(f"{name}-")
    )


def _read_answer(answer: Answer, result: Any) -> None:
    completion = result.outputs[0]
    answer.tokens = list(completion.token_ids)
    answer.logprobs = [
        entry[token].logprob
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    answer.cached_tokens = result.num_cached_tokens or 0
    answer.finish_reason = completion.finish_reason
