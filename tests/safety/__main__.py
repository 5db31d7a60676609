"""`python -m tests.safety [--list] [S1 ...]`: break every property, or those; see tests fail.

In a copy of the project, which must import itself. ``--list`` prints the changes and their tests
without making them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.safety.mutations import MUTATIONS, PROPERTIES, Mutation

ROOT = Path(__file__).parent.parent.parent
BOUND = 300.0  # seconds of one test
# No shrinking: that it fails is all that is asked.
PYTEST = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider"]
PYTEST += ["--hypothesis-profile", "first-failure"]


def main(mutations: Sequence[Mutation]) -> int:
    """Print one line for each mutation; 1 if a test passed that should have failed."""
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        ignored = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", ".hypothesis")
        shutil.copytree(ROOT, copy, ignore=ignored)
        _check_imports(copy)
        for mutation in mutations:
            red = _fails(copy, mutation)
            survived += not red
            verdict = "red" if red else "SURVIVED"
            print(f"{mutation.breaks:4} {verdict:9} {mutation.what}: {mutation.test}", flush=True)
    print(f"{len(mutations) - survived} of {len(mutations)} mutations are found")
    return int(survived > 0)


def _environment(copy: Path) -> dict[str, str]:
    """For the processes that tests start, too."""
    return {**os.environ, "PYTHONPATH": str(copy)}


def _check_imports(copy: Path) -> None:
    """Else the changed files would not be those that run."""
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import kvpp_core, tests; print(kvpp_core.__file__, tests.__file__)",
        ],
        cwd=copy,
        env=_environment(copy),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert all(Path(file).is_relative_to(copy) for file in said), f"not the copy: {said}"


def _fails(copy: Path, mutation: Mutation) -> bool:
    """Whether the test fails in the changed copy; it hangs or passes otherwise."""
    file = copy / mutation.file
    source = file.read_text()
    file.write_text(source.replace(mutation.old, mutation.new))
    try:
        ended = subprocess.run(
            [*PYTEST, mutation.test],
            cwd=copy,
            env=_environment(copy),
            capture_output=True,
            timeout=BOUND,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    finally:
        file.write_text(source)
    return ended.returncode == 1  # tests ran, and failed


def list_them(mutations: Sequence[Mutation]) -> int:
    """Print what is changed where, and the test that must fail."""
    for mutation in mutations:
        print(f"{mutation.breaks:4} {mutation.what}: {mutation.file}: {mutation.test}")
    return 0


if __name__ == "__main__":
    words = sys.argv[1:]
    asked = [word for word in words if word != "--list"] or PROPERTIES
    run = list_them if "--list" in words else main
    sys.exit(run([mutation for mutation in MUTATIONS if mutation.breaks in asked]))
