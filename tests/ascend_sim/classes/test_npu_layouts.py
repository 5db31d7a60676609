"""Every cache layout of vllm-ascend 0.23, from its own specification, allocation and reshape.

`NPUModelRunner._allocate_kv_cache_tensors` and `_reshape_kv_cache_tensors` run as they are, on the
simulated NPU, once with vllm-ascend's memory and once with KVPP's. Bytes and offsets must agree.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm_ascend.attention.mla_v1 import AscendMLABackend
from vllm_ascend.attention.sfa_v1 import AscendSFABackend
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

from kvpp_connectors.engine.ascend.caches import (
    ALIGNMENT,
    aligned_buffer,
    components_of,
    raw_tensors,
)
from kvpp_core.bundles import LayerBundle
from kvpp_core.layout import Placement, build_layout

BLOCKS, TOKENS = 4, 128
NAME = "model.layers.0.self_attn.attn"
LATENT, ROTARY, INDEX, PACKED = 512, 64, 128, 656
BF16, INT8, FP16 = torch.bfloat16, torch.int8, torch.float16
SFA = {"sparse_head_dim": (LATENT, ROTARY, INDEX)}
C8 = {"sparse_head_dim": (PACKED, 0, INDEX), "cache_sparse_sfa_c8": True}
LI = {"cache_sparse_li_c8": True}
K_V = [(BF16, LATENT), (BF16, ROTARY)]

Row = tuple[dict[str, Any], int, list[tuple[torch.dtype, int]]]
LAYOUTS: dict[str, Row] = {  # the specification, bytes per block, each tensor
    "MLA": ({}, 147_456, K_V),
    "SFA": (SFA, 180_224, [*K_V, (BF16, INDEX)]),
    "SFA without indexer": ({"sparse_head_dim": (LATENT, ROTARY, 0)}, 147_456, K_V),
    "SFA + LI-C8": (SFA | LI, 164_096, [*K_V, (INT8, INDEX), (FP16, 1)]),
    "SFA-C8": (C8, 116_736, [(INT8, PACKED), (BF16, INDEX)]),
    "SFA-C8 + LI-C8": (C8 | LI, 100_608, [(INT8, PACKED), (INT8, INDEX), (FP16, 1)]),
    "SFA-C8 without indexer": (C8 | {"sparse_head_dim": (PACKED, 0, 0)}, 83_968, [(INT8, PACKED)]),
}


class Caches:
    """One layer under vllm-ascend's code."""

    def __init__(self, row: Row) -> None:
        changes, self.bytes_per_block, self.tensors = row
        sparse = "sparse_head_dim" in changes
        self.spec = AscendMLAAttentionSpec(
            block_size=TOKENS,
            num_kv_heads=1,
            head_size=sum(changes.get("sparse_head_dim", (LATENT, ROTARY))),
            dtype=BF16,
            **changes,
        )
        size = BLOCKS * self.spec.page_size_bytes
        self.config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[KVCacheTensor(size=size, shared_by=[NAME])],
            kv_cache_groups=[KVCacheGroupSpec([NAME], self.spec)],
        )
        backend = AscendSFABackend if sparse else AscendMLABackend
        self.runner = NPUModelRunner.__new__(NPUModelRunner)
        vars(self.runner).update(
            device=torch.device("npu"),
            use_sparse=sparse,
            use_compress=False,
            use_hybrid_blocks=False,
            hybrid_with_attn_and_mamba=False,
            runner_only_attn_layers=set(),
            attn_backend=backend,
            c8_k_cache_dtype=INT8,
            c8_k_scale_cache_dtype=FP16,
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(
                    kv_lora_rank=LATENT, qk_rope_head_dim=ROTARY, index_head_dim=INDEX
                )
            ),
            vllm_config=SimpleNamespace(
                kv_transfer_config=KVTransferConfig(kv_connector="any", kv_role="kv_both"),
                quant_config=None,
            ),
            _get_layer_kv_cache_specs=lambda _: {NAME: self.spec},
            _kv_cache_spec_attn_group_iterator=lambda: [
                SimpleNamespace(backend=backend, kv_cache_spec=self.spec, layer_names=[NAME])
            ],
            # The layer that it would ask is no part of this test.
            _get_attention_kv_cache_dims=lambda *_: (LATENT, ROTARY),
        )

    def allocated(self) -> tuple[torch.Tensor, ...]:
        """vllm-ascend's raw tensors."""
        return tuple(self.runner._allocate_kv_cache_tensors(self.config)[NAME])

    def reshaped(self, raw: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What the layer is given."""
        return tuple(self.runner._reshape_kv_cache_tensors(self.config, {NAME: raw})[NAME])


@pytest.fixture(params=LAYOUTS)
def caches(request: pytest.FixtureRequest) -> Caches:
    return Caches(LAYOUTS[request.param])


def test_npu_specification_has_the_bytes_that_kvpp_plans(caches: Caches) -> None:
    layer = SimpleNamespace(kv_lora_rank=LATENT, qk_rope_head_dim=ROTARY)
    parts = components_of(NAME, caches.spec, layer)
    expected = [TOKENS * width * dtype.itemsize for dtype, width in caches.tensors]
    assert [part.bytes_per_block for part in parts] == expected
    assert sum(expected) == caches.spec.page_size_bytes == caches.bytes_per_block


def test_npu_allocation_of_vllm_ascend_has_these_bytes(caches: Caches) -> None:
    raw = caches.allocated()
    sizes = [BLOCKS * TOKENS * width * dtype.itemsize for dtype, width in caches.tensors]
    assert [tensor.numel() for tensor in raw] == sizes
    # An indexer's scales lie right behind its keys, wherever that is.
    aligned = [tensor.data_ptr() % ALIGNMENT == 0 for tensor in raw]
    assert all(aligned[:-1] if caches.tensors[-1] == (FP16, 1) else aligned)
    assert _seen(caches.reshaped(raw)) == _expected(caches)


def test_npu_reshape_of_vllm_ascend_takes_kvpps_memory(caches: Caches) -> None:
    layer = SimpleNamespace(kv_lora_rank=LATENT, qk_rope_head_dim=ROTARY)
    bundle = LayerBundle(0, components_of(NAME, caches.spec, layer))
    layout = build_layout(Placement((bundle,), (0,), 1, 0), BLOCKS)
    buffer = aligned_buffer(layout.size, torch.device("npu"))
    views = caches.reshaped(raw_tensors(buffer, layout)[NAME])
    assert _seen(views) == _expected(caches)
    # Numbers, not tensors: pytest shows what it compares, and these cannot be shown without an NPU.
    start = buffer.data_ptr()
    offsets = [view.data_ptr() - start for view in views]
    sizes = [view.nbytes for view in views]
    assert start % ALIGNMENT == 0
    assert offsets == [layout.components[part.name].offset for part in bundle.components]
    first, size = layout.targets[0]
    assert offsets == list(accumulate(sizes[:-1], initial=first))
    assert sum(sizes) == size == BLOCKS * caches.bytes_per_block


def _seen(views: tuple[torch.Tensor, ...]) -> list[tuple[torch.dtype, tuple[int, ...], bool]]:
    return [(view.dtype, tuple(view.shape), view.is_contiguous()) for view in views]


def _expected(caches: Caches) -> list[tuple[torch.dtype, tuple[int, ...], bool]]:
    shapes = [(dtype, (BLOCKS, TOKENS, 1, width)) for dtype, width in caches.tensors]
    assert sum(prod(shape) * dtype.itemsize for dtype, shape in shapes) == (
        BLOCKS * caches.bytes_per_block
    )
    return [(dtype, shape, True) for dtype, shape in shapes]
