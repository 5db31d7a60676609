"""Real engines for benchmarks, each in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.worker_process import WorkerProcess, serve_calls
from kvpp_connectors.demo.settings import ENVIRONMENT

__all__ = ["SWITCHES", "Engine", "bare_engine"]

# additional_config of engines that are compared. Both have the CPU profile: it is not measured.
SWITCHES: Mapping[str, dict[str, Any]] = {
    "off": {"kvpp": {"cpu_profile": True}},
    "on": {"enable_kvpp": True},
}

_TOKENS = 256  # of a step and of a request, in an engine that serves none

Answer = Callable[[Any, Any], Any]  # (llm, request) -> the answer to a call


class Engine(WorkerProcess):
    """An engine of the demo's model in a process of its own; calls run ``answer(llm, request)``."""

    def __init__(
        self,
        name: str,
        answer: Answer,
        model: str,
        environment: Mapping[str, str] = ENVIRONMENT,
        prepare: Callable[[], object] | None = None,
        **options: Any,
    ) -> None:
        """``prepare`` runs in the engine's process before its start; ``options`` are vLLM's.

        Both functions must be importable: the process is spawned.
        """
        super().__init__(name, _serve, answer, model, dict(environment), prepare, options)


def bare_engine(way: str, answer: Answer, model: str, ranks: int, memory: int) -> Engine:
    """An engine that serves no request: ``way`` of `SWITCHES`, ``memory`` bytes of KV per rank."""
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
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep vLLM's log out of the report
    if prepare is not None:
        prepare()
    from kvpp_connectors.demo.engine import start

    llm = start(model, **options)
    serve_calls(parent, lambda request: answer(llm, request))
    llm.llm_engine.engine_core.shutdown()
