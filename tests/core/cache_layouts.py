"""The cache layouts of sparse and dense MLA on Ascend, as models for a rig.

Each `CacheRow` is one row of vllm-ascend's layouts: the tensors that a layer keeps, with dtypes and
elements per token as its runner makes them. The bytes come from `kvpp_connectors.cli.model_shapes`,
which `kvpp plan` uses; the two must agree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from kvpp_connectors.cli.model_shapes import NO_INDEXER, ModelShape
from kvpp_core.bundles import Component, LayerBundle, group_bundles
from tests.core.rank_memory import Model

__all__ = ["MIXES", "ROWS", "CacheRow", "CacheTensor", "bundles", "model", "tensor_of"]

LATENT, ROPE, INDEX = 512, 64, 128  # elements per token


class CacheTensor(NamedTuple):
    """A tensor of (blocks, tokens of a block, 1, elements)."""

    dtype: torch.dtype
    elements: int

    def bytes(self, block_size: int) -> int:
        """Bytes of one block of ``block_size`` tokens."""
        return prod((block_size, self.elements, self.dtype.itemsize))


class CacheRow(NamedTuple):
    """How a layer keeps its cache."""

    main: str  # in MAIN_LAYOUTS
    indexer: str  # in INDEXER_LAYOUTS, or NO_INDEXER
    bytes: int  # per block of 128 tokens
    tensors: dict[str, CacheTensor]


_K_V = {"k": CacheTensor(torch.bfloat16, LATENT), "v": CacheTensor(torch.bfloat16, ROPE)}
_PACKED = {"packed": CacheTensor(torch.int8, 656)}  # 512 + 64 x 2 + 4 tiles x 4 bytes of scale
_PACKED_A5 = {"packed": CacheTensor(torch.float8_e4m3fn, 656)}
_DSA = {"dsa_k": CacheTensor(torch.bfloat16, INDEX)}
_DSA_C8 = {
    "dsa_k": CacheTensor(torch.int8, INDEX),
    "dsa_k_scale": CacheTensor(torch.float16, 1),
}
_DSA_C8_A5 = {
    "dsa_k": CacheTensor(torch.float8_e4m3fn, INDEX),
    "dsa_k_scale": CacheTensor(torch.float32, 1),
}

ROWS = {
    "MLA": CacheRow("bf16", NO_INDEXER, 147_456, _K_V),
    "SFA": CacheRow("bf16", "bf16", 180_224, _K_V | _DSA),
    "SFA without indexer": CacheRow("bf16", NO_INDEXER, 147_456, _K_V),
    "SFA + LI-C8": CacheRow("bf16", "c8-a2", 164_096, _K_V | _DSA_C8),
    "SFA-C8": CacheRow("sfa-c8", "bf16", 116_736, _PACKED | _DSA),
    "SFA-C8 + LI-C8": CacheRow("sfa-c8", "c8-a2", 100_608, _PACKED | _DSA_C8),
    "SFA-C8 without indexer": CacheRow("sfa-c8", NO_INDEXER, 83_968, _PACKED),
    "A5 SFA + LI-C8": CacheRow("bf16", "c8-a5", 164_352, _K_V | _DSA_C8_A5),
    "A5 SFA-C8 + LI-C8": CacheRow("sfa-c8", "c8-a5", 100_864, _PACKED_A5 | _DSA_C8_A5),
}
MIXES = ("SFA", "SFA + LI-C8", "SFA-C8", "SFA-C8 + LI-C8", "A5 SFA + LI-C8", "A5 SFA-C8 + LI-C8")


def model(
    row: CacheRow, block_size: int, layers: int = 6, *, mixed: bool = False, alignment: int = 1
) -> Model:
    """``layers`` target layers and an MTP layer of one row, for blocks of ``block_size`` tokens.

    In a ``mixed`` model layers 0, 3, 6, ... have an indexer, and the others use its top-k.
    """
    with_indexer = range(0, layers, 3) if mixed else range(layers)
    everything = bundles(row, block_size, layers, with_indexer)
    return Model(everything[:layers], everything[layers:], alignment)


def bundles(
    row: CacheRow, block_size: int, layers: int, with_indexer: Collection[int]
) -> tuple[LayerBundle, ...]:
    """The bundles of ``layers`` target layers and, as the last one, of an MTP layer."""
    shape = ModelShape(
        path=Path("config.json"),
        name="test",
        layers=layers,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        index_head_dim=INDEX,
        indexer_layers=frozenset(with_indexer),
        mtp_layers=1,
        dtype=None,
    )
    planned = (
        *shape.target_bundles(row.main, row.indexer, block_size),
        *shape.draft_bundles(1, row.main, row.indexer, block_size),
    )
    return group_bundles(
        (bundle.layer, component)
        for bundle in planned
        for planned_component in bundle.components
        for component in _as_on_ascend(row, bundle.layer, planned_component)
    )


def tensor_of(row: CacheRow, component: str) -> CacheTensor:
    """The tensor that a component of one of ``row``'s models stands for."""
    return row.tensors[component.rsplit(".", 1)[1]]


def _as_on_ascend(row: CacheRow, layer: int, planned: Component) -> Iterator[Component]:
    """The tensors behind a component of `kvpp plan`: unpacked latent and rope lie apart."""
    size, part = planned.bytes_per_block, planned.name.rsplit(".", 1)[1]
    if part == "main" and row.main == "bf16":
        parts = {"k": size * LATENT // (LATENT + ROPE), "v": size * ROPE // (LATENT + ROPE)}
    else:
        parts = {_NAMES[part]: size}
    return (Component(f"model.layers.{layer}.{name}", bytes_) for name, bytes_ in parts.items())


_NAMES = {"main": "packed", "indexer": "dsa_k", "indexer_scale": "dsa_k_scale"}
