"""Real engines for benchmarks, each in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.worker_process import AskedProcess, answer_all
from kvpp_connectors.demo.settings import ENVIRONMENT

__all__ = ["SWITCHES", "Engine", "bare_engine"]

# additional_config of engines that are compared: the CPU profile is no part of what is measured.
SWITCHES: Mapping[str, dict[str, Any]] = {
    "off": {"kvpp": {"cpu_profile": True}},
    "on": {"enable_kvpp": True},
}

_TOKENS = 256  # of a step and of a request, in an engine that answers none

Answer = Callable[[Any, Any], Any]  # of the engine, to a question


class Engine(AskedProcess):
    """An engine of the demo's kind that answers what ``answer(llm, question)`` returns."""

    def __init__(
        self,
        name: str,
        answer: Answer,
        model: str,
        environment: Mapping[str, str] = ENVIRONMENT,
        prepare: Callable[[], object] | None = None,
        **options: Any,
    ) -> None:
        """``prepare`` is called in the engine's process before the start; ``options`` are vLLM's.

        Both functions must be those of a module: the process is spawned.
        """
        super().__init__(name, _serve, answer, model, dict(environment), prepare, options)


def bare_engine(way: str, answer: Answer, model: str, ranks: int, memory: int) -> Engine:
    """An engine that is only looked at: ``way`` of `SWITCHES`, ``memory`` bytes of KV per rank."""
    return Engine(
        f"the engine with KVPP {way}",
        answer,
        model,
        additional_config=SWITCHES[way],
        tensor_parallel_size=ranks,
        kv_cache_memory_bytes=memory,
        max_num_batched_tokens=_TOKENS,
        max_model_len=_TOKENS,
        max_num_seqs=1,
    )


def _serve(
    parent: Connection,
    answer: Answer,
    model: str,
    environment: dict[str, str],
    prepare: Callable[[], object] | None,
    options: dict[str, Any],
) -> None:
    """In the engine's process."""
    os.environ.update(environment)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM's log is no part of the report
    if prepare is not None:
        prepare()
    from kvpp_connectors.demo.engine import start

    llm = start(model, **options)
    answer_all(parent, lambda question: answer(llm, question))
    llm.llm_engine.engine_core.shutdown()
