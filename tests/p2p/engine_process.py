"""A vLLM engine in a process of its own, which a test drives command by command."""

from __future__ import annotations

import contextlib
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.engine.harness import Engine, recorded_schedule, start_engine
from tests.fork_server import become_a_leader

__all__ = ["Served", "serve"]

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
        self._ended: list[dict[str, Any]] = []  # answers that nobody has asked for yet

    def generate(
        self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run one request to its end, stepping."""
        return self.finish(self.add(prompt, max_tokens, params))

    def finish(self, name: str) -> dict[str, Any]:
        """Step until a request has ended; its answer; tokens and preemptions meanwhile."""
        scheduled = preempted = 0
        while not any(answer["id"] == name for answer in self._ended):
            assert self._llm.llm_engine.has_unfinished_requests(), "no answer"
            with recorded_schedule(self._engine._scheduler) as outputs:
                self.step()
            scheduled += sum(output.total_num_scheduled_tokens for output in outputs)
            preempted += sum(len(output.preempted_req_ids or ()) for output in outputs)
        number = [answer["id"] for answer in self._ended].index(name)
        return {**self._ended.pop(number), "scheduled": scheduled, "preempted": preempted}

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> str:
        """Add a request without a step; its id."""
        from vllm import SamplingParams

        self._count += 1
        name = name or f"request-{self._count}"
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

    def step(self) -> None:
        """One step."""
        results = self._llm.llm_engine.step()
        self._ended += [self._answer(result) for result in results if result.finished]

    def step_until_running(self) -> None:
        """Step until a request has its first token."""
        while not any(request.num_output_tokens for request in self._engine._scheduler.running):
            self.step()

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the first worker."""
        return self.call_all(method, arguments)[0]

    def call_all(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        """Call a method of every worker; the answers by rank."""
        return self._engine.call(method, *arguments)

    def abort(self, name: str) -> None:
        """Abort a request."""
        self._llm.llm_engine.abort_request([name])

    def settle(self, seconds: float = SETTLE_SECONDS) -> dict[str, int]:
        """Step until no request is left, not even one that is held; then the free blocks."""
        self._engine.drain(seconds, self.step)
        return self.blocks()

    def blocks(self) -> dict[str, int]:
        """Free blocks, and requests that the scheduler knows."""
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        return {"free": self._engine.free_blocks, "requests": len(scheduler.requests)}

    def counts(self) -> dict[str, int]:
        """The scheduler half's counters."""
        connector = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        connector = getattr(connector, "sub_connectors", [connector])[0]
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


def serve(
    commands: Connection,
    log: Path,
    model: Path,
    environment: dict[str, str],
    options: dict[str, Any],
    kind: type[Served] = Served,
) -> None:
    """In a forked process: start an engine, say "ready", and serve commands until they end."""
    become_a_leader(log)
    os.environ.update(ENVIRONMENT | environment)
    with start_engine(model, **options) as engine, contextlib.suppress(EOFError):
        served = kind(engine)
        commands.send("ready")
        while True:
            do, arguments = commands.recv()
            commands.send(getattr(served, do)(**arguments))
