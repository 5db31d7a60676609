"""From vLLM's cache specifications to a placement, and from a layout to KVCacheTensors.

Section 2.2 of the specification: the planner keeps the complete logical view. A worker tells it
the memory that the KVPP capacity would take without KVPP, and lays out the final block count in
its own way: one KVCacheTensor per layer, each with its own offset into one backing buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from kvpp_connectors.launch.options import KvppOptions
from kvpp_core.bundles import Component, LayerBundle, group_bundles, largest_bytes_per_block
from kvpp_core.errors import PlanError
from kvpp_core.group import KvppGroup
from kvpp_core.layout import Placement, RankLayout
from kvpp_core.ownership import assign_owners

__all__ = [
    "ComponentsOf",
    "backing_buffer",
    "block_size_of",
    "check_one_group",
    "check_own_caches",
    "place",
    "plan",
    "read_bundles",
    "whole",
]

# The components of a layer's cache, from its name and its specification.
ComponentsOf = Callable[[str, Any], tuple[Component, ...]]


def whole(name: str, spec: Any) -> tuple[Component, ...]:
    """A layer's cache is one tensor."""
    return (Component(name, spec.page_size_bytes),)


def read_bundles(
    specs: Mapping[str, Any],
    draft_names: frozenset[str],
    components_of: ComponentsOf = whole,
) -> tuple[tuple[LayerBundle, ...], tuple[LayerBundle, ...]]:
    """Group vLLM's cache specs by transformer layer: (target bundles, draft bundles).

    Drafts stay as vLLM has them on each rank, so that full attention with heads of its own will do:
    vLLM's planner puts it into the target's cache group, over the same blocks.

    Raises:
        PlanError: a target's cache is not MLA, a draft's is not full attention, or block sizes
            differ.
    """
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    for name, spec in specs.items():
        if name not in draft_names and not isinstance(spec, MLAAttentionSpec):
            raise PlanError(
                f"the cache of {name} is a {type(spec).__name__}; KVPP handles MLAAttentionSpec "
                "only. Serve a non-hybrid MLA or SFA model or switch KVPP off."
            )
        if not isinstance(spec, FullAttentionSpec):
            raise PlanError(
                f"the draft's cache of {name} is a {type(spec).__name__}, with blocks of its own; "
                "KVPP follows the target's. Use a draft model with MLA or full attention, or none."
            )
    block_size_of(specs)
    targets, drafts = (
        group_bundles(
            (extract_layer_index(name), component)
            for name, spec in specs.items()
            if (name in draft_names) is wanted
            for component in components_of(name, spec)
        )
        for wanted in (False, True)
    )
    return targets, drafts


def check_own_caches(layers: Mapping[str, Any]) -> None:
    """Check that no layer, of the target or the draft, uses the cache of another one.

    Raises:
        PlanError: one does; names both.
    """
    for name, layer in layers.items():
        if owner := getattr(layer, "kv_sharing_target_layer_name", None):
            raise PlanError(
                f"{name} uses the cache of {owner}; under KVPP every layer has its own, and a "
                "draft cannot read a target's. Use a model or draft without KV sharing, or switch "
                "KVPP off."
            )


def block_size_of(specs: Mapping[str, Any]) -> int:
    """The block size in tokens that all caches share.

    Raises:
        PlanError: there is no cache, or there are several block sizes.
    """
    sizes = {spec.block_size for spec in specs.values()}
    if len(sizes) != 1:
        raise PlanError(
            f"the caches have block sizes {sorted(sizes)}; KVPP needs one block size for all"
        )
    return int(sizes.pop())


def plan(
    specs: Mapping[str, Any],
    draft_names: frozenset[str],
    group: KvppGroup,
    options: KvppOptions,
    components_of: ComponentsOf = whole,
) -> Placement:
    """The placement of one worker: who owns what in its group.

    Raises:
        PlanError: see `read_bundles`; or a packed broadcast could not hold one block.
    """
    targets, drafts = read_bundles(specs, draft_names, components_of)
    placement = Placement(
        bundles=targets,
        owners=assign_owners(targets, group.size, options.ownership),
        ranks=group.size,
        rank=group.rank,
        drafts=drafts,
        alignment=options.alignment_bytes,
        scratch=options.scratch,
    )
    largest = largest_bytes_per_block(targets)
    if 0 < options.staging_bytes < largest:
        raise PlanError(
            f"additional_config.kvpp.staging_bytes = {options.staging_bytes:,} cannot hold one "
            f"block of the largest layer, {largest:,} bytes; give it that "
            "much or 0 to switch packing off"
        )
    return placement


def check_one_group(config: Any) -> None:
    """Check that one table of blocks serves all layers.

    Raises:
        PlanError: the engine planned several cache groups.
    """
    if len(config.kv_cache_groups) != 1:
        raise PlanError(
            f"the engine planned {len(config.kv_cache_groups)} cache groups; KVPP follows the "
            "blocks of one. Serve a non-hybrid model without such a draft, or switch KVPP off."
        )


def place(config: Any, layout: RankLayout) -> Any:
    """The KVCacheConfig with every layer at its place in the KVPP layout.

    Raises:
        PlanError: the engine planned other layers, several cache groups, or a layout that is not
            one region per layer.
    """
    from vllm.v1.kv_cache_interface import KVCacheTensor

    check_one_group(config)
    planned = {name for tensor in config.kv_cache_tensors for name in tensor.layers}
    if planned != set(layout.components):
        odd = sorted(planned ^ set(layout.components))
        raise PlanError(
            f"the engine planned {len(planned)} caches, this worker budgeted "
            f"{len(layout.components)}; they differ in {', '.join(odd[:4])}"
        )
    bytes_per_block = {
        component.name: component.bytes_per_block
        for bundle in (*layout.placement.bundles, *layout.placement.drafts)
        for component in bundle.components
    }
    for tensor in config.kv_cache_tensors:
        if any(tensor.block_stride != bytes_per_block[name] for name in tensor.layers):
            raise PlanError(
                f"KV cache layout {config.kv_cache_layout} puts other layers between the blocks of "
                f"{tensor.layers[0]}; set VLLM_KV_CACHE_LAYOUT=LBNHC"
            )
    tensors = [
        KVCacheTensor(
            size=layout.size,
            layers=[name],
            layer_stride=span.size,
            block_stride=bytes_per_block[name],
            offset=span.offset,
        )
        for name, span in layout.components.items()
    ]
    return replace(config, kv_cache_tensors=tensors)


def backing_buffer(caches: Mapping[str, torch.Tensor], layout: RankLayout) -> torch.Tensor:
    """The worker's KV memory as one-dimensional bytes, found under the layers' views.

    Raises:
        PlanError: a view does not lie where the layout says, or the memory has another size.
    """
    storages = {name: cache.untyped_storage() for name, cache in caches.items()}
    first = next(iter(storages.values()))
    if first.nbytes() != layout.size:
        raise PlanError(f"allocated {first.nbytes():,} bytes of KV memory, not {layout.size:,}")
    for name, span in layout.components.items():
        offset = caches[name].data_ptr() - first.data_ptr()
        if storages[name].data_ptr() != first.data_ptr() or offset != span.offset:
            raise PlanError(f"the cache of {name} lies at byte {offset:,}, not {span.offset:,}")
    buffer = torch.empty(0, dtype=torch.int8, device=caches[name].device)
    return buffer.set_(first, 0, (layout.size,), (1,))
