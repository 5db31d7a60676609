"""Processes for tests, forked from a server that has vLLM imported: no start pays for the imports.

An import of vLLM takes 15 s of CPU; an engine of two ranks would pay it three times. The server is
multiprocessing's own. Its children may start children through it too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import tests.conftest  # noqa: F401  sets the environment that every process of a test has

__all__ = ["CONTEXT", "ForkedProcess", "become_a_leader", "call_apart", "forked_workers"]

Result = TypeVar("Result")

# What an engine and its workers have loaded by the end of a test.
PRELOAD = [
    "tests.fork_server",  # the environment comes before vLLM
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.mla.cpu_mla",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.deepseek_mtp",
]


class ForkedProcess(ForkServerProcess):
    """A forked process with the environment, output and process group of the one that starts it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)
        self._outputs = [f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2)]
        self._group = os.getpgrp()

    def run(self) -> None:
        """Take over what a started process has from its parent, then do the work."""
        os.environ.clear()
        os.environ.update(self._environment)
        for number, path in enumerate(self._outputs, start=1):
            output = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(output, number)
            os.close(output)
        os.setpgid(0, self._group)
        # The server of the first process serves its children too; they would start another.
        forkserver._forkserver.ensure_running = _nothing  # type: ignore[method-assign]
        super().run()


def _nothing() -> None:
    pass


class _Context(ForkServerContext):
    Process = ForkedProcess


CONTEXT = _Context()
CONTEXT.set_forkserver_preload(PRELOAD)


def become_a_leader(log: Path) -> None:
    """In a forked process: a process group of its own, for it and its workers, and a log."""
    os.setpgid(0, 0)
    with log.open("wb") as target:
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)


def call_apart(function: Callable[..., Result], *args: Any) -> Result:
    """The result of ``function(*args)`` in a process of its own.

    Mooncake reads its environment once in a process, so that an engine in the test's own process
    would have the settings of whatever ran there first.
    """
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as process:
        return process.submit(function, *args).result()


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """While the block runs, vLLM's executor starts its workers as forked processes."""
    with mock.patch("vllm.v1.executor.multiproc_executor.get_mp_context", lambda: CONTEXT):
        yield
