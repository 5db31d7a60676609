"""One engine of a cell, as a process of its own."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.engine.harness import kvpp_off, kvpp_on, start_engine
from tests.fork_server import become_a_leader
from tests.matrix.cells import Cell

__all__ = ["result_file", "run_engine"]

CONFIGS = {"on": kvpp_on(), "off": kvpp_off(), "plain": {}}


def result_file(folder: Path, kvpp: str, replica: int) -> Path:
    """Where an engine's result goes."""
    return folder / f"{kvpp}-{replica}.json"


def run_engine(folder: Path, cell: Cell, kvpp: str, replica: int, port: int) -> None:
    """In a forked process: run the cell's script and write what came of it into ``folder``.

    ``kvpp`` is "on", "off" or "plain" (without this package's help); ``port`` is where
    data-parallel replicas meet. An engine that does not start leaves a log and no result.
    """
    become_a_leader(folder / f"{kvpp}-{replica}.log")
    if cell.ranks.dp > 1:
        os.environ.update(
            VLLM_DP_RANK=str(replica),
            VLLM_DP_RANK_LOCAL=str(replica),
            VLLM_DP_SIZE=str(cell.ranks.dp),
            VLLM_DP_MASTER_IP="127.0.0.1",
            VLLM_DP_MASTER_PORT=str(port),
        )
    result = _run(folder / "model", cell, kvpp, replica)
    result_file(folder, kvpp, replica).write_text(json.dumps(result))


def _run(model: Path, cell: Cell, kvpp: str, replica: int) -> dict[str, Any]:
    with start_engine(model, CONFIGS[kvpp], **cell.options()) as engine:
        trace = engine.run(cell.script(replica))
        stats = engine.call("kvpp_stats") if kvpp == "on" else []
        return {
            "trace": asdict(trace),
            "broadcast_bytes": [rank["bytes_total"] for rank in stats],
            "compiled": bool(engine.vllm_config.compilation_config.mode),
            "blocks": engine.num_blocks,
        }
