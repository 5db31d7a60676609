"""Python in a process of its own: what is imported there, and what a user's shell would see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["TIMEOUT_S", "run", "run_python"]

TIMEOUT_S = 300  # importing vLLM takes 5 to 30 seconds on a busy machine


def run(
    command: Sequence[object], folder: Path, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run a command, of texts and paths, in ``folder``.

    An environment variable that is None is taken away.
    """
    merged = {**os.environ, **environment}
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,  # not the repository: its packages must come from where they are installed
        env={name: value for name, value in merged.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def run_python(
    code: str,
    folder: Path,
    *arguments: str,
    python: str = sys.executable,
    **environment: str | None,
) -> Any:
    """Run a program and return the JSON value that it prints on its last line."""
    command = [python, "-c", textwrap.dedent(code), *arguments]
    finished = run(command, folder, **environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])
