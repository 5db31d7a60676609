"""This machine: hardware, versions, and the commit of the checkout."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

import kvpp_connectors

__all__ = ["Machine", "mooncakes", "read_commit", "read_machine", "version_of"]

_MOONCAKE = ("non-cuda", "", "npu")
_GIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and versions, as benchmarks record them."""

    cpu: str  # model
    cores: int  # that this process may use
    memory: int  # bytes
    kernel: str
    python: str
    torch: str
    vllm: str
    mooncake: str

    def __str__(self) -> str:
        return (
            f"{self.cores} cores of {self.cpu}, {self.memory / 2**30:.0f} GiB, {self.kernel}, "
            f"Python {self.python}, torch {self.torch}, {self.vllm}, {self.mooncake}"
        )


def read_machine() -> Machine:
    """Read the facts of this machine."""
    from kvpp_connectors.vllm_api.check import vllm_version

    return Machine(
        cpu=_cpu_model(),
        cores=len(psutil.Process().cpu_affinity()),
        memory=psutil.virtual_memory().total,
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=version("torch"),
        vllm=vllm_version(),
        mooncake=", ".join(mooncakes()) or "no Mooncake",
    )


def read_commit() -> str | None:
    """The commit of the checkout that holds this package, marked if changed; None: installed."""
    folder = Path(kvpp_connectors.__file__).parents[1]
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or Path(top) != folder.resolve():
        return None  # installed, perhaps into an environment inside of some other checkout
    changed = _git(folder, "status", "--porcelain", "--", "kvpp_core", "kvpp_connectors")
    commit = _git(folder, "rev-parse", "--short", "HEAD")
    return f"{commit}, changed" if changed else commit


def mooncakes() -> list[str]:
    """Mooncake's installed distributions, each with its version."""
    names = [f"mooncake-transfer-engine-{kind}".rstrip("-") for kind in _MOONCAKE]
    return [f"{name} {number}" for name in names if (number := version_of(name)) is not None]


def version_of(distribution: str) -> str | None:
    """The version of a distribution, None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command in ``folder``; None without git or outside a checkout."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=False)
    except FileNotFoundError:
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None
