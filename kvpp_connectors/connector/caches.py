"""A worker's KV caches as blocks of bytes, from what its engine planned and the views it has.

How many blocks there are and how many bytes each has is what the planner says. The views are what
attention wants: in blocks of the *kernel*, of which a block of the scheduler may have several, and
with dimensions in the order of the kernel. A view that does not hold the planned bytes is refused.

vLLM keeps one tensor a layer, vllm-ascend a tuple of them; each tensor is a component.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvpp_core.errors import KvppError
from kvpp_core.layout import RankLayout

__all__ = [
    "CachePlan",
    "byte_rows",
    "cache_plan",
    "heads_first",
    "kept_rows",
    "layer_name",
    "part_name",
    "single_tensors",
    "storages",
]

_TOKENS, _HEADS = 2, 1  # dimensions of vLLM's views, (blocks, heads, tokens, content)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What the engine planned for the caches of this worker."""

    num_blocks: int
    block_bytes: Mapping[str, frozenset[int]] = field(repr=False)
    """Bytes per block of each layer, all its tensors together: with and without padding."""
    layout: RankLayout | None = None  # KVPP's


def cache_plan(kv_cache_config: Any, layout: RankLayout | None) -> CachePlan:
    """The plan in vLLM's KVCacheConfig; with KVPP the worker's layout of it.

    Raises:
        KvppError: the layout is for another number of blocks.
    """
    blocks = int(kv_cache_config.num_blocks)
    if layout is not None and layout.num_blocks != blocks:
        raise KvppError(
            f"KVPP laid out {layout.num_blocks:,} blocks and the engine planned {blocks:,}: the "
            "connector was made for another worker"
        )
    sizes: dict[str, frozenset[int]] = {}
    for group in kv_cache_config.kv_cache_groups:
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            spec = by_layer.get(name, group.kv_cache_spec)
            padded = int(spec.page_size_bytes)
            sizes[name] = frozenset({padded, int(getattr(spec, "real_page_size_bytes", padded))})
    return CachePlan(blocks, sizes, layout)


def kept_rows(kv_caches: Mapping[str, Any], plan: CachePlan) -> dict[str, torch.Tensor]:
    """The components that this worker keeps for good, each as uint8 (blocks, bytes per block).

    With KVPP these are its own layers and its drafts: scratch memory is never among them.

    Args:
        kv_caches: what vLLM gives to ``register_kv_caches``.
        plan: of the same engine.

    Raises:
        KvppError: a component is missing, or its view is not what was planned; names both figures.
    """
    tensors = single_tensors(kv_caches)
    if plan.layout is None:
        _check_layers(kv_caches, plan)
        return {
            name: byte_rows(name, tensor, plan.num_blocks, _bytes(tensor) // plan.num_blocks)
            for name, tensor in tensors.items()
        }
    placement = plan.layout.placement
    bundles = [*(placement.bundles[i] for i in placement.owned), *placement.drafts]
    rows = {}
    for component in (c for bundle in bundles for c in bundle.components):
        if component.name not in tensors:
            raise KvppError(
                f"cache {component.name!r} is not among this rank's {len(tensors)} caches "
                f"({', '.join(list(tensors)[:4])}, ...)"
            )
        rows[component.name] = byte_rows(
            component.name, tensors[component.name], plan.num_blocks, component.bytes_per_block
        )
    return rows


def byte_rows(name: str, view: torch.Tensor, num_blocks: int, block_bytes: int) -> torch.Tensor:
    """A component's memory as uint8 (num_blocks, block_bytes), whatever ``view`` looks like.

    Raises:
        KvppError: the view holds other bytes, or a block of it is not in one piece.
    """
    if _bytes(view) != num_blocks * block_bytes or view.shape[0] % num_blocks:
        raise KvppError(
            f"the cache {name!r} of shape {tuple(view.shape)} and {view.dtype} has "
            f"{_bytes(view):,} bytes; the engine planned {num_blocks:,} blocks of "
            f"{block_bytes:,} bytes"
        )
    pages = view.shape[0] // num_blocks  # blocks of the kernel in one of the scheduler
    page_bytes, step = block_bytes // pages, view.stride(0) * view.element_size()
    if not _is_dense(view[0]) or (pages > 1 and step != page_bytes):
        raise KvppError(
            f"a block of {name!r} is not in one piece: shape {tuple(view.shape)}, strides "
            f"{view.stride()}; set VLLM_KV_CACHE_LAYOUT=LBNHC"
        )
    if pages > 1 and heads_first(view):
        raise KvppError(
            f"a block of {name!r} is {pages} blocks of the attention kernel, each with its heads "
            "first: a peer with other kernels has other bytes; set VLLM_KV_CACHE_LAYOUT=LBNHC, or "
            f"--block-size {view.shape[_TOKENS]}"
        )
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(
        view.untyped_storage(),
        view.storage_offset() * view.element_size(),
        (num_blocks, block_bytes),
        (pages * step, 1),
    )


def part_name(layer: str, index: int) -> str:
    """The name of one tensor of a layer's tuple: a component of the layer's bundle."""
    return f"{layer}[{index}]"


def layer_name(part: str) -> str:
    """The layer of a part's name."""
    return part.rpartition("[")[0]


def single_tensors(caches: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every cache tensor by a name of its own, from what vLLM passes for each layer."""
    return {
        name: tensor
        for layer, cache in caches.items()
        for name, tensor in _parts(layer, cache).items()
    }


def storages(tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """(address, bytes) of the memory under tensors, once each, to register it."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return tuple(dict.fromkeys((storage.data_ptr(), storage.nbytes()) for storage in found))


def _parts(layer: str, cache: Any) -> dict[str, torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        return {layer: cache}
    return {part_name(layer, index): part for index, part in enumerate(cache)}


def _check_layers(kv_caches: Mapping[str, Any], plan: CachePlan) -> None:
    """Check that the tensors of each layer hold what was planned for it."""
    for layer, cache in kv_caches.items():
        planned = plan.block_bytes.get(layer)
        if planned is None:
            raise KvppError(f"the engine planned no cache for {layer!r}, which has one")
        found = sum(_bytes(tensor) for tensor in _parts(layer, cache).values())
        if found not in {plan.num_blocks * size for size in planned}:
            shapes = [tuple(tensor.shape) for tensor in _parts(layer, cache).values()]
            raise KvppError(
                f"the cache of {layer!r} of shape {', '.join(map(str, shapes))} has {found:,} "
                f"bytes; the engine planned {plan.num_blocks:,} blocks of "
                f"{' or '.join(f'{size:,}' for size in sorted(planned))} bytes"
            )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_dense(block: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def heads_first(view: torch.Tensor) -> bool:
    """Whether the tokens of a head follow each other within a block; False for one head."""
    return (
        view.dim() > _TOKENS
        and view.shape[_HEADS] > 1
        and view.stride(_HEADS) > view.stride(_TOKENS)
    )
