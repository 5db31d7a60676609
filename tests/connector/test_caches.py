"""A cache's blocks are what the engine planned, whatever view of them attention was given.

Views come from vLLM's own allocation. A block's bytes are compared as two engines see them whose
attention kernels have unlike blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvpp_connectors.connector.caches import cache_plan, heads_first, kept_rows, storages
from kvpp_connectors.engine.placement import place
from kvpp_connectors.p2p.protocol import Description
from kvpp_connectors.p2p.read_plan import Incompatible, cache_regions, choose_sources, plan_reads
from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.errors import KvppError
from kvpp_core.layout import Placement, RankLayout, build_layout

BLOCKS, TOKENS = 10, 128
NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(2)]
MLA = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
HEADS = FullAttentionSpec(block_size=TOKENS, num_kv_heads=4, head_size=16, dtype=torch.bfloat16)
Spec = Any  # MLAAttentionSpec or FullAttentionSpec


def config_of(spec: Spec) -> KVCacheConfig:
    """Two layers, each in one region."""
    size = spec.page_size_bytes
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_groups=[KVCacheGroupSpec(layer_names=NAMES, kv_cache_spec=spec)],
        kv_cache_tensors=[
            KVCacheTensor(
                size=2 * BLOCKS * size, layers=NAMES, layer_stride=BLOCKS * size, block_stride=size
            )
        ],
    )


def kvpp_layout(spec: Spec) -> RankLayout:
    """This rank keeps the first layer; the second one is in its scratch memory."""
    size = spec.page_size_bytes
    bundles = tuple(LayerBundle(i, (Component(name, size),)) for i, name in enumerate(NAMES))
    return build_layout(Placement(bundles, (0, 1), 2, 0), BLOCKS)


def allocated(
    spec: Spec,
    kernel_block: int = TOKENS,
    layout: KVCacheLayout = KVCacheLayout.LBNHC,
    kvpp: RankLayout | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """vLLM's views of an engine's caches, and what its connector makes of them."""
    config = config_of(spec)
    if kvpp is not None:
        config = place(config, kvpp)
    views = allocate_kv_cache(config, torch.device("cpu"), layout, [kernel_block])
    return views, kept_rows(views, cache_plan(config, kvpp))


def by_token(view: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A cache as (blocks of the scheduler, tokens, heads, content), as attention reads it."""
    _, heads, tokens, content = view.shape
    flat = view.reshape(BLOCKS, TOKENS // tokens, heads, tokens, content).permute(0, 1, 3, 2, 4)
    return flat.reshape(BLOCKS, TOKENS, heads, content)


def pull(
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    remote: Sequence[int],
    local: Sequence[int],
) -> None:
    """Copy what a pull of the first layer reads."""
    own = cache_regions({NAMES[0]: ours[NAMES[0]]})
    sources = {region.name: ("session", region) for region in cache_regions(theirs)}
    for read in plan_reads(own, sources, remote, local):
        ctypes.memmove(read.local, read.remote, read.size)


@pytest.mark.parametrize("kvpp", [False, True])
@pytest.mark.parametrize("decode_kernel", [128, 64, 32])
@pytest.mark.parametrize("prefill_kernel", [128, 64, 32])
@pytest.mark.parametrize("spec", [MLA, HEADS], ids=["one head", "four heads"])
def test_kernels_with_smaller_blocks_than_the_schedulers_move_the_same_bytes(
    spec: Spec, prefill_kernel: int, decode_kernel: int, kvpp: bool
) -> None:
    layout = kvpp_layout(spec) if kvpp else None
    theirs, their_rows = allocated(spec, prefill_kernel, kvpp=layout)
    ours, our_rows = allocated(spec, decode_kernel)
    assert set(their_rows) == set(NAMES[: 1 if kvpp else 2])
    size = spec.page_size_bytes
    assert {tuple(rows.shape) for rows in their_rows.values()} == {(BLOCKS, size)}
    source = by_token(theirs[NAMES[0]], spec)
    values = torch.randn(source.shape).to(spec.dtype)
    write_by_token(theirs[NAMES[0]], values)
    remote, local = [3, 4, 7], [1, 2, 5]
    pull(our_rows, their_rows, remote, local)
    found = by_token(ours[NAMES[0]], spec)
    assert torch.equal(found[local], values[remote])
    untouched = [block for block in range(BLOCKS) if block not in local]
    assert not found[untouched].any() and not ours[NAMES[1]].any()


def write_by_token(view: torch.Tensor, values: torch.Tensor) -> None:
    """Put (blocks, tokens, heads, content) into a cache through its view."""
    pages, heads, tokens, content = view.shape
    view.copy_(values.reshape(pages, tokens, heads, content).permute(0, 2, 1, 3))


def test_heads_beside_each_token_are_one_piece() -> None:
    """LBNHC is what the remedy of a block in pieces names: with several heads, too."""
    _, rows = allocated(HEADS, layout=KVCacheLayout.LBNHC)
    assert len(rows) == len(NAMES)


def test_a_block_in_pieces_is_refused_with_a_layout_that_works() -> None:
    """LHBNC puts other blocks between the heads of one."""
    view = torch.zeros(4, BLOCKS, TOKENS, 32, dtype=torch.bfloat16).permute(1, 0, 2, 3)
    with pytest.raises(KvppError, match=r"not in one piece.*VLLM_KV_CACHE_LAYOUT=LBNHC"):
        kept_rows(dict.fromkeys(NAMES, view), cache_plan(config_of(HEADS), None))


def test_heads_first_within_each_kernel_block_is_refused_with_a_layout_that_works() -> None:
    """A peer whose kernel takes the whole block has all tokens of a head together."""
    says = "2 blocks of the attention kernel.*LBNHC, or --block-size 64"
    with pytest.raises(KvppError, match=says):
        allocated(HEADS, 64, KVCacheLayout.LBHNC)


@pytest.mark.parametrize("kvpp", [False, True])
@pytest.mark.parametrize(
    "shape", [(BLOCKS, 1, TOKENS, 575), (BLOCKS - 1, 1, TOKENS, 640), (BLOCKS * 2, 1, TOKENS, 576)]
)
def test_a_view_that_does_not_fit_the_plan_is_refused_with_both_figures(
    shape: tuple[int, ...], kvpp: bool
) -> None:
    views = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in NAMES}
    plan = cache_plan(config_of(MLA), kvpp_layout(MLA) if kvpp else None)
    with pytest.raises(KvppError) as error:
        kept_rows(views, plan)
    found = views[NAMES[0]].nbytes
    for words in (NAMES[0], str(shape), f"{found:,} bytes", "10 blocks of 147,456 bytes"):
        assert words in str(error.value)


def test_a_tuple_of_tensors_is_checked_as_a_layer() -> None:
    """vllm-ascend keeps a layer's latent and rotary key apart."""
    plan = cache_plan(config_of(MLA), None)
    parts = [torch.zeros(BLOCKS, TOKENS, 1, width, dtype=torch.bfloat16) for width in (512, 64)]
    rows = kept_rows({name: tuple(parts) for name in NAMES}, plan)
    assert {name: tuple(part.shape) for name, part in rows.items()} == {
        f"{name}[{index}]": (BLOCKS, TOKENS * width * 2)
        for name in NAMES
        for index, width in enumerate((512, 64))
    }
    with pytest.raises(KvppError, match=r"163,840 bytes; .* 10 blocks of 147,456 bytes"):
        kept_rows(dict.fromkeys(NAMES, (parts[1],)), plan)


def test_a_cache_that_was_not_planned_is_refused() -> None:
    with pytest.raises(KvppError, match="planned no cache for 'other'"):
        kept_rows({"other": torch.zeros(BLOCKS, 4)}, cache_plan(config_of(MLA), None))


def test_a_layout_of_other_blocks_is_refused() -> None:
    layout = build_layout(kvpp_layout(MLA).placement, BLOCKS + 1)
    with pytest.raises(KvppError, match="laid out 11 blocks and the engine planned 10"):
        cache_plan(config_of(MLA), layout)


def test_memory_that_several_caches_share_is_named_once() -> None:
    views, rows = allocated(MLA)
    storage = views[NAMES[0]].untyped_storage()
    assert storages(rows.values()) == ((storage.data_ptr(), storage.nbytes()),)


@pytest.mark.parametrize("ours_first", [False, True])
def test_blocks_of_unlike_order_are_refused_by_a_pull(ours_first: bool) -> None:
    """Each is in one piece and has the same bytes, which mean other tokens and heads."""
    layouts = [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC]
    sides = [description(layout) for layout in (layouts if ours_first else layouts[::-1])]
    with pytest.raises(Incompatible) as error:
        choose_sources(sides[0], [sides[1]])
    first = "here" if ours_first else "session"
    for words in (NAMES[0], f"one after another at {first}", "same VLLM_KV_CACHE_LAYOUT"):
        assert words in str(error.value)
    choose_sources(sides[0], [sides[0]])


def description(layout: KVCacheLayout) -> Description:
    views, rows = allocated(HEADS, layout=layout)
    regions = cache_regions(rows, [name for name in rows if heads_first(views[name])])
    return Description("epoch", "session", "model", TOKENS, "bfloat16", regions)
