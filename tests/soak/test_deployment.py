"""`benchmarks soak`, two minutes: engines killed, frozen and started again under traffic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BOUND_S = 1000.0  # on a machine with other things to do


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_two_minutes_of_traffic_leave_nothing_wrong(tmp_path: Path) -> None:
    """Answers, bounds, blocks, files, threads, mappings and memory."""
    command = [sys.executable, "-m", "benchmarks", "soak", "--minutes=2"]
    environment = {**os.environ, "COLUMNS": "200"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # of tests' engines; servers need it
    running = subprocess.Popen(
        [*command, f"--logs={tmp_path / 'logs'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    try:
        said, _ = running.communicate(timeout=BOUND_S)
    finally:
        running.terminate()  # it stops its servers
        running.wait()
    assert running.returncode == 0, said
    assert "prefill killed" in said and "decode killed" in said and "All right." in said
