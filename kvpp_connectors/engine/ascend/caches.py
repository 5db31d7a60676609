"""The tensors that vllm-ascend 0.23 keeps for a layer, in bytes, from its cache specification.

A layer's cache is a tuple: MLA (latent, rotary key); SFA the same or, with C8, one packed tensor;
then, in layers with an indexer, its keys and, with C8, their scales. vllm-ascend sizes them by
ratios of a layer's total; here they are counted, and their sum must be the specification's total.
"""

from __future__ import annotations

from typing import Any

import torch

from kvpp_connectors.connector.caches import layer_name, part_name
from kvpp_connectors.connector.transfer_engine import ALIGNMENT
from kvpp_core.bundles import Component
from kvpp_core.errors import PlanError
from kvpp_core.layout import RankLayout

__all__ = ["ALIGNMENT", "aligned_buffer", "components_of", "raw_tensors"]


def components_of(name: str, spec: Any, layer: Any) -> tuple[Component, ...]:
    """The components of an attention layer, in the order of its tuple.

    Args:
        name: the layer's, to which the index in the tuple is added.
        spec: its AscendMLAAttentionSpec, or a draft's FullAttentionSpec.
        layer: the attention layer itself; a dense MLA specification has its total width only.

    Raises:
        PlanError: the parts do not add up to the specification's bytes per block.
    """
    tokens = spec.block_size * spec.num_kv_heads
    sizes = [tokens * width for width in _bytes_per_token(spec, layer)]
    if sum(sizes) != spec.page_size_bytes:
        raise PlanError(
            f"the cache of {name} takes {spec.page_size_bytes:,} bytes per block, and its parts "
            f"{' + '.join(f'{size:,}' for size in sizes)}: a layout that KVPP does not know. "
            "Switch KV-cache quantization other than LI-C8 and SFA-C8 off, or KVPP"
        )
    return tuple(Component(part_name(name, i), size) for i, size in enumerate(sizes))


def _bytes_per_token(spec: Any, layer: Any) -> list[int]:
    """One number for each tensor."""
    sparse = getattr(spec, "sparse_head_dim", None)
    if sparse is None:
        key = getattr(layer, "kv_lora_rank", spec.head_size)
        value = getattr(layer, "qk_rope_head_dim", getattr(spec, "head_size_v", spec.head_size))
        return [key * spec.dtype.itemsize, value * spec.dtype.itemsize]
    key, value, index = sparse
    packed, scaled = spec.cache_sparse_sfa_c8, spec.cache_sparse_li_c8
    copies = spec.sfa_dcp_replicated_indexer_size
    main = spec.c8_k_cache_dtype if packed else spec.dtype
    found = [key * main.itemsize] + ([] if packed else [value * main.itemsize])
    if index:
        indexer = spec.c8_k_cache_dtype if scaled else spec.dtype
        found.append(index * copies * indexer.itemsize)
        if scaled:
            found.append(copies * spec.c8_k_scale_cache_dtype.itemsize)
    return found


def aligned_buffer(size: int, device: torch.device) -> torch.Tensor:
    """Zero bytes that start at a multiple of `ALIGNMENT`, in a storage of that much more."""
    storage = torch.zeros(size + ALIGNMENT, dtype=torch.int8, device=device)
    start = -storage.data_ptr() % ALIGNMENT
    return storage[start : start + size]


def raw_tensors(buffer: torch.Tensor, layout: RankLayout) -> dict[str, tuple[torch.Tensor, ...]]:
    """Every layer's tuple, as bytes at its place in ``buffer``; vllm-ascend gives them shapes."""
    found: dict[str, list[torch.Tensor]] = {}
    placement = layout.placement
    for bundle in (*placement.bundles, *placement.drafts):
        for component in bundle.components:  # sorted by name: in the order of the tuple
            span = layout.components[component.name]
            part = buffer[span.offset : span.end]
            found.setdefault(layer_name(component.name), []).append(part)
    return {layer: tuple(parts) for layer, parts in found.items()}
