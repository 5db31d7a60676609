"""One engine of a cell, as a process of its own: python -m tests.matrix.engine FOLDER JSON.

JSON holds a cell's names, how KVPP stands ("on", "off" or "plain": without this package's help),
and the replica. The result is written into FOLDER; an engine that does not start leaves none.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401  sets the environment before vLLM is imported
from tests.engine.harness import kvpp_off, kvpp_on, start_engine
from tests.matrix.cells import Cell

__all__ = ["main", "result_file"]

CONFIGS = {"on": kvpp_on(), "off": kvpp_off(), "plain": {}}


def result_file(folder: Path, kvpp: str, replica: int) -> Path:
    """Where an engine's result goes."""
    return folder / f"{kvpp}-{replica}.json"


def main() -> None:
    """Run the cell's script and write what came of it."""
    folder, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    cell, kvpp, replica = Cell(**task["cell"]), task["kvpp"], task["replica"]
    if cell.ranks.dp > 1:
        os.environ.update(
            VLLM_DP_RANK=str(replica),
            VLLM_DP_RANK_LOCAL=str(replica),
            VLLM_DP_SIZE=str(cell.ranks.dp),
            VLLM_DP_MASTER_IP="127.0.0.1",
            VLLM_DP_MASTER_PORT=str(task["port"]),
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


if __name__ == "__main__":
    main()
