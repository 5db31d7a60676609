"""Runs a cell: its engines with KVPP off and on, side by side, and what the comparison says."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from kvpp_connectors.connector.ports import reserved_ports
from tests.engine import tiny_models
from tests.fork_server import CONTEXT, ForkedProcess
from tests.matrix.cells import SPECULATION, Cell
from tests.matrix.engine import result_file, run_engine

__all__ = ["Outcome", "run_cell", "watch"]

LIMIT = 420  # seconds; an engine that takes longer hangs
LOOK = 1.0  # seconds between looks at replicas
DP_PORTS = 10  # from VLLM_DP_MASTER_PORT on: vLLM takes the next for each group that it starts
MOVED = "Address already in use. Retrying with a new port"  # vLLM's parallel.py
ERROR = re.compile(r"\b(\w+(?:Error|Refused|Mismatch)): (.+)")
HARMLESS = "Tokenizer not available"  # vLLM logs it whenever there is no tokenizer


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cell says. ``right`` is None where vLLM itself cannot run the combination."""

    right: bool | None
    words: str


def run_cell(cell: Cell, folder: Path) -> Outcome:
    """Compare KVPP on with KVPP off; or show why there is nothing to compare.

    ``folder`` receives the checkpoint, each engine's log and its result.
    """
    tiny_models.write(folder / "model", cell.tiny())
    if cell.ranks.tp == 1:
        refusal = _run(cell, folder, ["on"])
        told = re.search(r"\[group-larger-than-one\].*?(?= \[type=|$)", refusal.get("on-0", ""))
        return Outcome(bool(told), f"refused: {told[0]}" if told else "not refused")
    if cell.ranks.pp > 1 and SPECULATION[cell.speculation]:
        # Sparse attention runs on CPU with our help only.
        way, words = ("plain", "plain vLLM") if cell.model == "MLA" else ("off", "KVPP off")
        failed = _run(cell, folder, [way])
        if failed:
            return Outcome(None, f"{words}: {_error(failed[f'{way}-0'])}")
    failed = _run(cell, folder, ["off", "on"])
    if failed:
        name, log = next(iter(failed.items()))
        return Outcome(False, f"KVPP {name} failed: {_error(log)}")
    return _compare(cell, folder)


def _compare(cell: Cell, folder: Path) -> Outcome:
    compiled = False
    for replica in range(cell.ranks.dp):
        off, on = (_read(result_file(folder, kvpp, replica)) for kvpp in ("off", "on"))
        for what in ("schedule", "answers"):
            if off["trace"][what] != on["trace"][what]:
                return Outcome(False, f"no: the {what} of replica {replica} differ")
        if not all(count > 0 for count in on["broadcast_bytes"]) and not replica:
            return Outcome(False, f"no broadcasts: {on['broadcast_bytes']}")
        if replica and not on["trace"]["dummy_steps"]:
            return Outcome(False, f"replica {replica} was never without work: nothing is shown")
        compiled = on["compiled"]
    if cell.mode == "compiled" and not compiled:
        return Outcome(True, "yes, eagerly: vLLM does not compile this model on CPU")
    return Outcome(True, "yes")


def _run(cell: Cell, folder: Path, ways: list[str]) -> dict[str, str]:
    """Run engines at the same time; the logs of those that left no result."""
    engines: dict[str, dict[str, ForkedProcess]] = {}
    with ExitStack() as stack:
        for kvpp in ways:
            first, *_ = stack.enter_context(reserved_ports(DP_PORTS))
            engines[kvpp] = {}
            for replica in range(cell.ranks.dp):
                args = (folder, cell, kvpp, replica, first)
                process = CONTEXT.Process(target=run_engine, args=args)
                process.start()
                engines[kvpp][f"{kvpp}-{replica}"] = process
        watch(list(engines.values()), folder, LIMIT)
    names = [name for replicas in engines.values() for name in replicas]
    return {name: _log(folder, name) for name in names if not _has_ended_well(folder, name)}


def watch(engines: Sequence[Mapping[str, ForkedProcess]], folder: Path, limit: float) -> None:
    """Wait for engines of several replicas each; end an engine as soon as one of its is lost.

    A replica that ended without a result, or that serves at another port than its peers ask at,
    would keep them waiting for minutes: here it takes a second.
    """
    deadline = time.monotonic() + limit
    while alive := [p for replicas in engines for p in replicas.values() if p.is_alive()]:
        wait([process.sentinel for process in alive], LOOK)
        for replicas in engines:
            reasons = [_lost(name, process, folder) for name, process in replicas.items()]
            if time.monotonic() > deadline:
                reasons.append(f"no end within {limit:g} s")
            for reason in [reason for reason in reasons if reason][:1]:
                for name, process in replicas.items():
                    _end(process, folder / f"{name}.log", reason)


def _lost(name: str, process: ForkedProcess, folder: Path) -> str:
    """Why the peers of a replica wait for it in vain; nothing if they do not."""
    log = _log(folder, name)
    if MOVED in log:
        return f"{name} found its port taken and went to another one, where nobody asks"
    if not process.is_alive() and not _has_ended_well(folder, name):
        return f"{name} ended with exit code {process.exitcode}: {_error(log)}"
    return ""


def _end(process: ForkedProcess, log: Path, reason: str) -> None:
    """Kill a replica and its workers, if it still runs; its log says why."""
    if not process.is_alive() or process.pid is None:
        return
    process.kill()
    with suppress(ProcessLookupError):  # it had not become a leader yet
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    with log.open("a") as file:
        file.write(f"\nReplicaError: killed, because {reason}\n")


def _has_ended_well(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").exists()


def _log(folder: Path, name: str) -> str:
    file = folder / f"{name}.log"
    return file.read_text(errors="replace") if file.exists() else ""


def _error(log: str) -> str:
    """The first error of a log, shortened; a worker's comes before the engine's own."""
    for match in ERROR.finditer(log):
        if HARMLESS not in match[0]:
            return match[0][:200]
    return f"no error in the log; its end: {log[-200:]!r}"


def _read(file: Path) -> Any:
    return json.loads(file.read_text())
