"""Runs a cell: its engines with KVPP off and on, side by side, and what the comparison says."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpp_connectors.connector.host import free_ports
from tests.engine import tiny_models
from tests.fork_server import CONTEXT
from tests.matrix.cells import SPECULATION, Cell
from tests.matrix.engine import result_file, run_engine

__all__ = ["Outcome", "run_cell"]

LIMIT = 420  # seconds; an engine that takes longer hangs
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
    running = {}
    for kvpp in ways:
        (port,) = free_ports(1)
        for replica in range(cell.ranks.dp):
            process = CONTEXT.Process(target=run_engine, args=(folder, cell, kvpp, replica, port))
            process.start()
            running[f"{kvpp}-{replica}"] = process
    failed = {}
    for name, process in running.items():
        process.join(LIMIT)
        if process.exitcode is None and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        if not (folder / f"{name}.json").exists():
            failed[name] = (folder / f"{name}.log").read_text(errors="replace")
    return failed


def _error(log: str) -> str:
    """The first error of a log, shortened; a worker's comes before the engine's own."""
    for match in ERROR.finditer(log):
        if HARMLESS not in match[0]:
            return match[0][:200]
    return f"no error in the log; its end: {log[-200:]!r}"


def _read(file: Path) -> Any:
    return json.loads(file.read_text())
