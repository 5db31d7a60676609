"""The facts of this engine that the pool works with, read from vLLM's configuration once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpp_connectors.connector.identity import DraftIdentity, kv_cache_dtype, model_identity
from kvpp_connectors.pool.keys import (
    Fingerprint,
    Namespace,
    SpeculativeCache,
    Topology,
    hash_seed,
)
from kvpp_connectors.pool.messages import PoolWorkerFacts
from kvpp_connectors.pool.options import PoolOptions, loads_blocks, read_pool_options

__all__ = ["PoolFacts", "object_namespace", "pool_facts"]


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One engine: its ranks, its blocks, what it may do."""

    options: PoolOptions
    extra: Mapping[str, Any]  # as given, for the backend's own settings
    loads: bool
    saves: bool
    block_size: int  # tokens
    heads_split_over: int  # TP ranks that keep different heads; 1 for MLA
    device_type: str
    lag: int  # steps that the scheduler runs ahead of its workers' answers


def pool_facts(vllm_config: Any) -> PoolFacts:
    """Read the facts from a VllmConfig.

    Raises:
        KvppError: the connector's own settings are wrong; names each.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    options = read_pool_options(transfer.kv_connector_extra_config)
    consumes_only = transfer.kv_role == "kv_consumer"
    return PoolFacts(
        options=options,
        extra=transfer.kv_connector_extra_config,
        loads=loads_blocks(transfer.kv_role, options.consumer_is_to_load),
        saves=not consumes_only or options.consumer_is_to_put,
        block_size=vllm_config.cache_config.block_size,
        heads_split_over=1 if vllm_config.model_config.use_mla else parallel.tensor_parallel_size,
        device_type=vllm_config.device_config.device_type,
        lag=vllm_config.max_concurrent_batches,
    )


def object_namespace(
    vllm_config: Any,
    kv_cache_config: Any,
    facts: PoolFacts,
    workers: Mapping[tuple[int, ...], PoolWorkerFacts],
) -> Namespace:
    """The namespace of this engine's objects, from what its workers keep.

    ``workers`` are keyed by (pipeline stage, rank in it, ...).

    Raises:
        KvppError: something that decides the bytes is not known, or is random in each process.
    """
    stages: dict[int, PoolWorkerFacts] = {}
    for ranks in sorted(workers):
        stages.setdefault(ranks[0], workers[ranks])
    ordered = [stages[stage] for stage in sorted(stages)]
    manifests = [worker.manifest for worker in ordered if worker.manifest is not None]
    if manifests:
        drafts = [stage for stage in sorted(stages) if stages[stage].drafts]
        topology = Topology.kvpp(manifests, drafts)
    else:
        topology = Topology.replicated([w.layers for w in ordered], facts.heads_split_over)
    draft_components = tuple(draft for worker in ordered for draft in worker.drafts)
    fingerprint = _fingerprint(vllm_config, kv_cache_config, facts, draft_components)
    return Namespace(fingerprint, topology)


def _fingerprint(
    vllm_config: Any,
    kv_cache_config: Any,
    facts: PoolFacts,
    draft_components: tuple[tuple[str, int], ...],
) -> Fingerprint:
    cache = vllm_config.cache_config
    model = model_identity(vllm_config, facts.options.model_id)
    return Fingerprint(
        model=model.name,
        revision=model.revision,
        numbers=model.numbers,
        weights=model.weights,
        model_dtype=model.dtype,
        kv_cache_dtype=kv_cache_dtype(vllm_config),
        quantization=model.quantization,
        cache_layout=_cache_layout(kv_cache_config),
        block_size=facts.block_size,
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_seed=hash_seed(str(cache.prefix_caching_hash_algo), os.environ),
        speculative=_speculative(model.draft, draft_components),
    )


def _cache_layout(config: Any) -> str:
    """The kinds of caches, the bytes of their blocks, and the order of several heads."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    single = [one for spec in specs for one in getattr(spec, "kv_cache_specs", {0: spec}).values()]
    kinds = {f"{type(spec).__name__}:{spec.page_size_bytes}" for spec in specs}
    if any(getattr(one, "num_kv_heads", 1) > 1 for one in single):
        kinds.add(f"order:{getattr(config, 'kv_cache_layout', None)}")
    return " ".join(sorted(kinds))


def _speculative(
    draft: DraftIdentity | None, components: tuple[tuple[str, int], ...]
) -> SpeculativeCache | None:
    if draft is None:
        return None
    return SpeculativeCache(draft.method, draft.name, draft.weights, components, draft.numbers)
