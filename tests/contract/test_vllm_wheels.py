"""The hooks in the wheels that users install: vLLM 0.32, which this is made for, and 0.33.

The wheels come from the package registry that pip is told of (about 330 MB each) and are read, not
installed or imported. Their Python files (under 60 MB each) are kept in the user's cache folder, so
that each is downloaded once per machine. Without a registry these tests fail: both versions are
there, and nothing else shows that the CUDA build has what KVPP needs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from kvpp_connectors.engine.hooks import HOOKS, check_hooks
from kvpp_connectors.engine.sources import Sources
from kvpp_connectors.rules import FULL_GRAPHS
from kvpp_core.errors import KvppError
from tests.contract.processes import run

VERSIONS = ("0.32.0", "0.33.0")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "kvpp-connectors"


def obtain(version: str) -> Sources:
    """The source of a released vLLM, from the cache folder or from the package registry."""
    kept = CACHE / f"vllm-{version}"
    if not kept.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            unpacked = Path(folder) / "unpacked"
            with zipfile.ZipFile(download(f"vllm=={version}", Path(folder))) as wheel:
                wheel.extractall(unpacked, [n for n in wheel.namelist() if n.endswith(".py")])
            if not kept.is_dir():  # another process may have been faster
                unpacked.rename(kept)
    return Sources(kept, f"vllm {version}")


def download(requirement: str, folder: Path) -> Path:
    """A wheel from the package registry, into ``folder``, by a pip of its own."""
    python = folder / "venv" / "bin" / "python"
    made = run([sys.executable, "-m", "venv", folder / "venv"], folder)
    assert made.returncode == 0, made.stdout + made.stderr
    only_this = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet"]
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


@pytest.fixture(scope="module", params=VERSIONS)
def vllm(request: pytest.FixtureRequest) -> Sources:
    """The source of one of the releases."""
    version: str = request.param
    return obtain(version)


def test_a_release_has_every_hook(vllm: Sources) -> None:
    """Names and parameters, those of CUDA and of both model runners too; it lists what differs."""
    check_hooks(HOOKS, vllm)


def test_it_is_that_release_which_was_read(vllm: Sources) -> None:
    """Its version file says so, and nothing of it was imported."""
    number = vllm.version.split()[1]
    assert f"'{number}'" in (vllm.text("vllm._version") or "")
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    assert not any(file.startswith(str(vllm.root)) for file in files)


def test_a_release_has_no_graph_mode_that_the_rules_do_not_know(vllm: Sources) -> None:
    """The rules name the full modes: a new one would be taken for none of them."""
    found = vllm.find("vllm.config", "CUDAGraphMode")
    assert found is not None
    modes = {name for name in vllm.members(found) if name.isupper()}
    assert modes == {"NONE", "PIECEWISE", *FULL_GRAPHS}


class Renamed(Sources):
    """A release in which one thing has another name."""

    def __init__(self, original: Sources, old: str, new: str) -> None:
        super().__init__(original.root, original.version)
        self.old, self.new = old, new

    def text(self, module: str) -> str | None:
        """The source of a module, with the new name."""
        text = super().text(module)
        return None if text is None else text.replace(self.old, self.new)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "def prepare_kv_cache_update(",
            "def prepare_update(",
            "vllm.model_executor.layers.attention.mla_attention.MLAAttention."
            "prepare_kv_cache_update is missing",
        ),
        (
            "self.speculator",
            "self.proposer",
            "vllm.v1.worker.gpu.model_runner.GPUModelRunner.speculator is missing",
        ),
        (
            "    block_stride: int",
            "    stride: int",
            "vllm.v1.kv_cache_interface.KVCacheTensor has no parameter block_stride; "
            "it has size, layers, layer_stride, stride, offset, host_resident",
        ),
    ],
    ids=["a method", "an attribute of the runner", "a field"],
)
def test_a_release_that_differs_is_told_by_name(
    vllm: Sources, old: str, new: str, complaint: str
) -> None:
    with pytest.raises(KvppError) as caught:
        check_hooks(HOOKS, Renamed(vllm, old, new))
    assert str(caught.value).startswith(
        f"{vllm.version} does not have what KVPP hooks: {complaint}. "
    )


def test_a_version_that_the_registry_does_not_have_fails_by_name(tmp_path: Path) -> None:
    """The test fails, with the requirement and pip's own words; it does not pass or skip."""
    with pytest.raises(pytest.fail.Exception) as caught:
        download("vllm==0.0.0", tmp_path)
    text = str(caught.value)
    assert "the package registry does not give the wheel of vllm==0.0.0" in text
    assert "No matching distribution" in text
