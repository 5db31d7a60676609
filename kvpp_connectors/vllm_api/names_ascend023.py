"""What KVPP hooks in vllm-ascend 0.23 and in the vLLM 0.23 below it.

The table of `names_vllm032` is for vLLM 0.32. Here stands what 0.23 lacks of it,
what it has instead, and the names of vllm-ascend. vllm-ascend 0.24 to 0.27 have no KVPP either;
what they lack of this table is written down in tests/contract/test_ascend_wheels.py.
"""

from __future__ import annotations

from kvpp_connectors.vllm_api.hook import Hook, Part, members, platform_hooks, worker_hooks
from kvpp_connectors.vllm_api.names_vllm032 import HOOKS

__all__ = ["ASCEND_HOOKS", "FIRST_TOUCH", "ONLY_DECODE"]

_NPU = (Part.NPU,)
_CACHE = "vllm.v1.kv_cache_interface"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_NPU_WORKER = "vllm_ascend.worker.worker"
_NPU_RUNNER = "vllm_ascend.worker.model_runner_v1"
_MLA = "vllm_ascend.attention.mla_v1"
_MLA_CP = "vllm_ascend.attention.context_parallel.mla_cp"
_SFA = "vllm_ascend.attention.sfa_v1"
_SFA_CP = "vllm_ascend.attention.context_parallel.sfa_cp"
_SPECS = "vllm_ascend.core.kv_cache_interface"

# The methods of an attention implementation in which a layer's cache is first written or read.
# Under PCP, MLA's prefill writes its cache in the preprocessing itself.
_DENSE = ("exec_kv_decode", "exec_kv_prefill")
_SPARSE = ("exec_kv", "_sfa_preprocess_with_mlapo", "_sfa_preprocess_with_prolog_v3")
FIRST_TOUCH = {
    "AscendMLAImpl": _DENSE,
    "AscendMlaCPImpl": (*_DENSE, "mla_preprocess_prefill"),
    "AscendSFAImpl": _SPARSE,
    "AscendSFACPImpl": _SPARSE,
}
# The fused path of decode-only batches: a function that is given the implementation.
ONLY_DECODE = "mla_preprocess_only_decode"

_ONLY_SINCE_032 = {
    "KVCacheTensor",  # one tensor per layer below, not one buffer with offsets
    "KVCacheConfig",
    "MLAAttention.prepare_kv_cache_update",
    "SpeculativeConfig.num_speculative_tokens_per_batch_size",
    "AttentionConfig.hisparse_config",
}
_OTHER_PLATFORMS = {Part.CPU, Part.CUDA, Part.V2}

ASCEND_HOOKS = (
    *(
        hook
        for hook in HOOKS
        if hook.attribute not in _ONLY_SINCE_032 and not _OTHER_PLATFORMS & set(hook.needed_by)
    ),
    # vLLM 0.23.
    Hook(_CACHE, "KVCacheTensor", ("size", "shared_by")),
    Hook(_CACHE, "KVCacheConfig", ("num_blocks", "kv_cache_tensors", "kv_cache_groups")),
    *members(_CACHE, "MLAAttentionSpec", "num_kv_heads head_size dtype"),
    *members(_RUNNER, "GPUModelRunner", "get_model"),
    *members(
        _BASE,
        "KVConnectorBase_V1",
        "register_kv_caches start_load_kv wait_for_layer_load save_kv_layer wait_for_save "
        "get_finished get_block_ids_with_load_errors get_handshake_metadata "
        "set_xfer_handshake_metadata_pp_aware handle_preemptions",
    ),
    # vllm-ascend: the platform and the worker.
    *platform_hooks("vllm_ascend.platform", "NPUPlatform", Part.NPU),
    *worker_hooks(_NPU_WORKER, "NPUWorker", Part.NPU),
    *members(_NPU_WORKER, "NPUWorker", "use_v2_model_runner", _NPU),
    # Its model runner: who allocates a layer's tensors, and who gives them their shapes.
    Hook(_NPU_RUNNER, "NPUModelRunner._allocate_kv_cache_tensors", ("kv_cache_config",), _NPU),
    Hook(
        _NPU_RUNNER,
        "NPUModelRunner._reshape_kv_cache_tensors",
        ("kv_cache_config", "kv_cache_raw_tensors"),
        _NPU,
    ),
    Hook(_NPU_RUNNER, "NPUModelRunner.initialize_kv_cache", ("kv_cache_config",), _NPU),
    *members(_NPU_RUNNER, "NPUModelRunner", "drafter hybrid_with_attn_and_mamba", _NPU),
    *members(
        "vllm_ascend.spec_decode.llm_base_proposer", "AscendSpecDecodeBaseProposer", "model", _NPU
    ),
    # What a layer's tensors are made of.
    *members(
        _SPECS,
        "AscendMLAAttentionSpec",
        "sparse_head_dim cache_sparse_sfa_c8 cache_sparse_li_c8 c8_k_cache_dtype "
        "c8_k_scale_cache_dtype sfa_dcp_replicated_indexer_size page_size_bytes",
        _NPU,
    ),
    # The attention implementations, and where they first touch their cache.
    *(
        Hook(module, f"{name}.forward", ("layer_name", "kv_cache", "attn_metadata"), _NPU)
        for module, name in ((_MLA, "AscendMLAImpl"), (_SFA, "AscendSFAImpl"))
    ),
    *(
        Hook(module, f"{name}.{method}", ("kv_cache",), _NPU)
        for module, name in (
            (_MLA, "AscendMLAImpl"),
            (_MLA_CP, "AscendMlaCPImpl"),
            (_SFA, "AscendSFAImpl"),
            (_SFA_CP, "AscendSFACPImpl"),
        )
        for method in FIRST_TOUCH[name]
    ),
    Hook(
        "vllm_ascend.device.device_op",
        f"BaseDeviceAdaptor.{ONLY_DECODE}",
        ("atten_obj", "kv_cache"),
        _NPU,
    ),
    Hook("vllm_ascend.device.device_op", "DeviceOperator", (), _NPU),
)
