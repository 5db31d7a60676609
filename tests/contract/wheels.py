"""Releases of vLLM and its platforms, read from their wheels: not installed, not imported.

The wheels come from the package registry that pip is told of. Their Python files (under 60 MB each)
are kept in the user's cache folder, so that each is downloaded once per machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from kvpp_connectors.vllm_api.sources import Sources
from tests.contract.processes import run

__all__ = ["Renamed", "download", "obtain"]

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "kvpp-connectors"


def obtain(name: str, version: str) -> Sources:
    """The source of a release, from the cache folder or from the package registry."""
    kept = CACHE / f"{name}-{version}"
    if not kept.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            unpacked = Path(folder) / "unpacked"
            with zipfile.ZipFile(download(f"{name}=={version}", Path(folder))) as wheel:
                wheel.extractall(unpacked, [n for n in wheel.namelist() if n.endswith(".py")])
            if not kept.is_dir():  # another process may have been faster
                unpacked.rename(kept)
    return Sources(kept, f"{name} {version}")


def download(requirement: str, folder: Path) -> Path:
    """A wheel from the package registry, into ``folder``, by a pip of its own."""
    python = folder / "venv" / "bin" / "python"
    made = run([sys.executable, "-m", "venv", folder / "venv"], folder)
    assert made.returncode == 0, made.stdout + made.stderr
    only_this = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet"]
    # The one wheel of vllm-ascend is for one Python; it is read here, and never runs.
    only_this += ["--python-version", "3.11"]
    command = [python, "-m", "pip", "download", *only_this, "--dest", folder, requirement]
    finished = run(command, folder)
    if finished.returncode != 0:
        pytest.fail(
            f"the package registry does not give the wheel of {requirement}, which this test "
            f"reads:\n{finished.stdout}{finished.stderr}",
            pytrace=False,
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


class Renamed(Sources):
    """A release in which one thing has another name."""

    def __init__(self, original: Sources, old: str, new: str) -> None:
        super().__init__(original.root, original.version, original.elsewhere)
        self.old, self.new = old, new

    def text(self, module: str) -> str | None:
        """The source of a module, with the new name."""
        text = super().text(module)
        return None if text is None else text.replace(self.old, self.new)
