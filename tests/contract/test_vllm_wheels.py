"""The hooks in the wheels that users install: vLLM 0.32, which this is made for, and 0.33.

The wheels (about 330 MB each) are read, not installed or imported. Without a package registry these
tests fail: both versions are there, and nothing else shows that the CUDA build has what KVPP needs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvpp_connectors.launch.rules import FULL_GRAPHS
from kvpp_connectors.vllm_api.check import check_hooks
from kvpp_connectors.vllm_api.names_vllm032 import HOOKS
from kvpp_connectors.vllm_api.sources import Sources
from kvpp_core.errors import KvppError
from tests.contract.wheels import Renamed, download, obtain

pytestmark = pytest.mark.network

VERSIONS = ("0.32.0", "0.33.0")


@pytest.fixture(scope="module", params=VERSIONS)
def vllm(request: pytest.FixtureRequest) -> Sources:
    """The source of one of the releases."""
    version: str = request.param
    return obtain("vllm", version)


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
