"""Real gloo ranks in processes of their own, kept alive so that many scenarios share one start.

A scenario is a module-level function whose first argument is its `Rank`. Whatever a scenario
does, `GlooWorld.run` returns or raises within a bound: a rank that is stuck or has died is named,
with the stack of every thread of it, and all ranks of the world are killed and started afresh for
the next scenario.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from tests.fork_server import CONTEXT

__all__ = ["BOUND", "GlooWorld", "Rank", "RankFailure"]

BOUND = 60.0  # seconds that one scenario, or the start of a small world, may take by default
START = 20.0  # seconds for each rank of a large world: on a busy machine all share one core
GRACE = 15.0  # seconds that the other ranks get to end by themselves once one has failed

# A forked rank pays for no imports; an accelerator's runtime does not outlive a fork.
_CONTEXT = multiprocessing.get_context("spawn") if torch.accelerator.is_available() else CONTEXT

P = ParamSpec("P")
T = TypeVar("T")


class Rank(NamedTuple):
    """Who a scenario runs as."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait for all ranks of the world (not of a KVPP group)."""
        dist.barrier()


class RankFailure(AssertionError):
    """A rank of a gloo world raised, died or was stuck."""


class _Answer(NamedTuple):
    ok: bool
    value: Any  # the scenario's result, or its traceback as text


class _Child(NamedTuple):
    process: BaseProcess
    connection: Connection
    stacks: Path


class GlooWorld:
    """``size`` processes, each a rank of one gloo world; started by the first `run`.

    ``bound`` (seconds) is how long a scenario may take.
    """

    def __init__(self, size: int, bound: float = BOUND) -> None:
        self._size = size
        self.bound = bound
        self._children: list[_Child] = []
        self._directory: Path | None = None

    def run(
        self, scenario: Callable[Concatenate[Rank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Run ``scenario`` on every rank; return the results in rank order.

        Raises:
            RankFailure: a rank raised, died, or had not ended within ``bound`` seconds.
        """
        if not self._children:
            self._start()
        for child in self._children:
            child.connection.send((scenario, args, kwargs))
        return [answer.value for answer in self._answers(scenario.__name__, self.bound)]

    def close(self) -> None:
        """End all ranks; those that do not go by themselves are killed."""
        for child in self._children:
            if child.process.is_alive():
                child.connection.send(None)
        for child in self._children:
            child.process.join(5.0)
        self._kill(signal.SIGKILL)
        self._children = []
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="gloo-world-"))
        for rank in range(self._size):
            here, there = multiprocessing.Pipe()
            stacks = self._directory / f"stacks-{rank}.txt"
            process = _CONTEXT.Process(
                target=_serve,
                args=(Rank(rank, self._size), self._directory / "store", stacks, there),
                name=f"gloo-rank-{rank}",
                daemon=True,
            )
            process.start()
            there.close()
            self._children.append(_Child(process, here, stacks))
        self._answers("the start of the world", _start_bound(self._size))

    def _answers(self, what: str, bound: float) -> list[_Answer]:
        """One answer of every rank, or RankFailure and a world that is gone."""
        deadline = time.monotonic() + bound
        answers: dict[int, _Answer] = {}
        while len(answers) < self._size:
            arrived = self._collect(answers, max(deadline - time.monotonic(), 0.0))
            if not arrived:
                break
            if not all(answer.ok for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        if len(answers) == self._size and all(answer.ok for answer in answers.values()):
            return [answers[rank] for rank in range(self._size)]
        raise RankFailure(self._autopsy(what, answers))

    def _collect(self, answers: dict[int, _Answer], timeout: float) -> bool:
        """Take in what has arrived; False when nothing came in time."""
        waiting = {
            child.connection: rank
            for rank, child in enumerate(self._children)
            if rank not in answers
        }
        ready = wait(list(waiting), timeout)
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting[connection]
            try:
                answers[rank] = connection.recv()
            except EOFError:
                process = self._children[rank].process
                process.join(5.0)
                answers[rank] = _Answer(False, f"died with exit code {process.exitcode}")
        return bool(ready)

    def _autopsy(self, what: str, answers: Mapping[int, _Answer]) -> str:
        """Kill the world; say what each rank had come to."""
        self._kill(signal.SIGABRT)
        report = [f"{what} failed in a gloo world of {self._size}:"]
        for rank, child in enumerate(self._children):
            if rank not in answers:
                stacks = child.stacks.read_text() if child.stacks.exists() else ""
                report.append(f"--- rank {rank} was stuck, at:\n{stacks}")
            elif not answers[rank].ok:
                report.append(f"--- rank {rank}: {answers[rank].value}")
        self.close()
        return "\n".join(report)

    def _kill(self, number: signal.Signals) -> None:
        """Signal the children that live, by their own ids. SIGABRT makes them write stacks."""
        for child in self._children:
            if child.process.is_alive() and child.process.pid is not None:
                os.kill(child.process.pid, number)
        for child in self._children:
            child.process.join(5.0)
            if child.process.is_alive():
                child.process.kill()
                child.process.join(5.0)


def _serve(rank: Rank, store: Path, stacks: Path, connection: Connection) -> None:
    """A rank's process: join the world, then run scenarios until the other end says stop."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with stacks.open("w") as file:
        faulthandler.enable(file)
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        answer = _attempt(_join, (rank, store), {})
        while True:
            connection.send(answer)
            try:
                job = connection.recv()
            except EOFError:
                job = None
            if job is None:
                os._exit(0)  # a scenario may have left a hung collective behind
            scenario, args, kwargs = job
            answer = _attempt(scenario, (rank, *args), kwargs)


def _start_bound(size: int) -> float:
    return max(BOUND, START * size)


def _join(rank: Rank, store: Path) -> None:
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(rank.rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank.rank,
        world_size=rank.size,
        timeout=timedelta(seconds=_start_bound(rank.size)),
    )


def _attempt(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> _Answer:
    try:
        return _Answer(True, function(*args, **kwargs))
    except BaseException:  # noqa: BLE001 - reported to the test, which fails with it
        return _Answer(False, traceback.format_exc())
