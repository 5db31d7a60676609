"""A vLLM engine in a process of its own, which a test drives command by command."""

from __future__ import annotations

import contextlib
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.engine.harness import Engine, recorded_schedule, start_engine
from tests.fork_server import become_a_leader

__all__ = ["serve"]

ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",
    # Two decode ranks spin on two cores while they wait: a read may starve for a while.
    "MC_TCP_STATUS_TIMEOUT_SEC": "60",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "60",
    "MC_TRANSFER_TIMEOUT": "120",
}
SETTLE_SECONDS = 60


class Served:
    """The engine and its commands. A command is a method; its arguments are keywords."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._llm = engine._llm
        self._count = 0

    def generate(
        self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run one request to its end, stepping."""
        name = self.add(prompt, max_tokens, params)
        scheduled = 0
        while self._llm.llm_engine.has_unfinished_requests():
            with recorded_schedule(self._engine._scheduler) as outputs:
                results = self._llm.llm_engine.step()
            scheduled += sum(output.total_num_scheduled_tokens for output in outputs)
            for result in results:
                if result.request_id == name and result.finished:
                    return {**self._answer(result), "scheduled": scheduled}
        raise AssertionError("the engine ended without an answer")

    def add(self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None) -> str:
        """Add a request without a step; its id."""
        from vllm import SamplingParams

        self._count += 1
        name = f"request-{self._count}"
        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=1,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def step(self, count: int = 1) -> list[dict[str, Any]]:
        """Step some times; the answers of requests that ended."""
        return [
            self._answer(result)
            for _ in range(count)
            for result in self._llm.llm_engine.step()
            if result.finished
        ]

    def abort(self, name: str) -> None:
        """Abort a request."""
        self._llm.llm_engine.abort_request([name])

    def settle(self, seconds: float = SETTLE_SECONDS) -> dict[str, int]:
        """Step until no request is left, not even one that is held; then the free blocks."""
        deadline = time.monotonic() + seconds
        core = self._llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            assert time.monotonic() < deadline, f"still held: {list(core.scheduler.requests)}"
            self._llm.llm_engine.step()
        return self.blocks()

    def blocks(self) -> dict[str, int]:
        """Free blocks, and requests that the scheduler knows."""
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        return {"free": self._engine.free_blocks, "requests": len(scheduler.requests)}

    def counts(self) -> dict[str, int]:
        """The scheduler half's counters."""
        connector = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        sides = (connector._prefill, connector._decode)
        return {k: v for side in sides if side for k, v in side.counts().items()}

    def reset(self) -> None:
        """Forget cached prefixes."""
        self._engine.reset_prefix_cache()

    @staticmethod
    def _answer(result: Any) -> dict[str, Any]:
        completion = result.outputs[0]
        return {
            "id": result.request_id,
            "tokens": list(completion.token_ids),
            "cached": result.num_cached_tokens or 0,
            "finish": completion.finish_reason,
            "params": result.kv_transfer_params,
        }


def serve(commands: Connection, log: Path, model: Path, options: dict[str, Any]) -> None:
    """In a forked process: start an engine, say "ready", and serve commands until they end."""
    become_a_leader(log)
    os.environ.update(ENVIRONMENT)
    with start_engine(model, **options) as engine, contextlib.suppress(EOFError):
        served = Served(engine)
        commands.send("ready")
        while True:
            do, arguments = commands.recv()
            commands.send(getattr(served, do)(**arguments))
