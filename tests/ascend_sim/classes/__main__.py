"""`python -m tests.ascend_sim.classes [pytest's arguments]`: vllm-ascend's classes, simulated NPU.

Run by the python of $VENV; `make test-ascend-classes` has put the rest into $VENV-ascend-sim.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.ascend_sim.build import build


def main() -> None:
    """Build what is older than its sources, and become the process that runs the tests."""
    beside = Path(f"{sys.prefix}-ascend-sim")
    packages, libraries = beside / "classes", beside / "cann"
    build(packages / "torch_npu", libraries)
    os.environ |= {
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": f"{packages}:{Path.cwd()}",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TASK_QUEUE_ENABLE": "0",
    }
    # Not pytest's own tracebacks: they show tensors, which takes an NPU's operators.
    arguments = ["--tb=native", "tests/ascend_sim/classes", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])


if __name__ == "__main__":
    main()
