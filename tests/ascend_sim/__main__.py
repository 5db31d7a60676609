"""`python -m tests.ascend_sim [pytest's arguments]`: tests on the simulated NPU.

Run by the python of an environment that has torch-npu (`make test-ascend-sim` makes one). Without
the name of a test everything that can run on the NPU does. ``mutations`` as the only argument
breaks each ordering once, in a copy of the project, and sees a test fail.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from tests.ascend_sim.build import build

DEFAULT = [
    "tests/core/test_pipeline_steps.py",
    "tests/core/test_pipeline_failures.py",
    "tests/safety/test_s04_loads_and_broadcasts.py",
    "tests/safety/test_s05_nothing_read_early.py",
    "tests/safety/test_s07_earlier_writes.py",
    "tests/safety/test_s10_sources_and_slots.py",
    "tests/ascend_sim",
]


def main() -> None:
    """Build what is older than its sources, and become the process that runs the tests."""
    arguments = sys.argv[1:]
    libraries = Path(sys.prefix) / "cann"
    build(Path(sysconfig.get_path("purelib")) / "torch_npu", libraries)
    os.environ["LD_LIBRARY_PATH"] = str(libraries)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns of what CANN's folders lack
    # Gates are put on streams past torch-npu's own queue, which otherwise holds operations back.
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    run = [sys.executable, "-m"]
    if arguments == ["mutations"]:
        run += ["tests.ascend_sim.mutations"]
    else:
        named = any(argument.startswith("tests/") for argument in arguments)
        run += ["pytest", "-k", "npu", *([] if named else DEFAULT), *arguments]
    os.execv(sys.executable, run)


if __name__ == "__main__":
    main()
