"""The names of vLLM 0.32 that this package hooks or reads."""

from __future__ import annotations

from kvpp_connectors.vllm_api.hook import Hook, Part, members, platform_hooks, worker_hooks

__all__ = ["HOOKS"]

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
