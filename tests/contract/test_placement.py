"""From vLLM's cache specifications to views of one buffer, with vLLM's own planner and allocator.

The configurations come from vLLM's planner and the views from its allocator; what is checked are
the bytes under them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from kvpp_connectors.engine.adapter import Adapter032
from kvpp_connectors.engine.placement import (
    backing_buffer,
    block_size_of,
    check_own_caches,
    place,
    plan,
    read_bundles,
)
from kvpp_connectors.engine.rank import KvppRank
from kvpp_connectors.engine.worker import KvppWorkerMixin
from kvpp_connectors.launch.options import KvppOptions
from kvpp_core.bundles import Component
from kvpp_core.capacity import blocks_that_fit
from kvpp_core.errors import PlanError
from kvpp_core.group import KvppGroup
from kvpp_core.layout import RankLayout, build_layout
from kvpp_core.ownership import OwnershipPolicy
from tests.contract.launches import engine_config

BLOCK = 16  # tokens
MAIN, INDEXER = BLOCK * 576 * 4, BLOCK * 132  # bytes per block: float32 latent; C8 indexer
LAYERS, DRAFT = 5, 5  # target layers 0..4; the draft is one more
BLOCKS = 7

Specs = dict[str, Any]
NO_DRAFTS: frozenset[str] = frozenset()


def attn(layer: int) -> str:
    """vLLM's name of a layer's main cache."""
    return f"model.layers.{layer}.self_attn.attn"


def indexer(layer: int) -> str:
    """vLLM's name of a layer's indexer cache."""
    return f"model.layers.{layer}.self_attn.indexer.k_cache"


def mla_spec(block_size: int = BLOCK) -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=576, dtype=torch.float32
    )


def indexer_spec() -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

    return MLAAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )


def full_spec() -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=16, dtype=torch.float32)


def dense_specs() -> Specs:
    """An MLA model."""
    return {attn(layer): mla_spec() for layer in range(LAYERS)}


def mixed_specs() -> Specs:
    """A sparse model with shared indexers and an MTP layer: bundles of two sizes, one draft.
    As on vLLM, indexers are registered before the main caches."""
    specs: Specs = {}
    for layer in range(LAYERS + 1):
        if layer % 2 == 0 or layer == DRAFT:
            specs[indexer(layer)] = indexer_spec()
        specs[attn(layer)] = mla_spec()
    return specs


def eagle_specs() -> Specs:
    """An MLA model with a Llama-like draft, whose heads are split over the ranks."""
    return {**dense_specs(), attn(DRAFT): full_spec()}


MIXED_DRAFTS = frozenset({attn(DRAFT), indexer(DRAFT)})

MODELS: dict[str, tuple[Callable[[], Specs], frozenset[str]]] = {
    "dense": (dense_specs, NO_DRAFTS),
    "sparse with a draft": (mixed_specs, MIXED_DRAFTS),
    "dense with a draft of full attention": (eagle_specs, frozenset({attn(DRAFT)})),
}


def group(rank: int = 0, size: int = 2) -> KvppGroup:
    """A group for planning alone: it has no process groups."""
    none = cast("dist.ProcessGroup", None)
    return KvppGroup(tuple(range(size)), rank, none, none)


def layout_of(
    specs: Specs, drafts: frozenset[str], rank: int, *, ranks: int = 2, **options: Any
) -> RankLayout:
    """The layout of one rank with BLOCKS blocks."""
    placement = plan(specs, drafts, group(rank, ranks), KvppOptions(**options))
    return build_layout(placement, BLOCKS)


@pytest.fixture(scope="module")
def planner(mla_model: Path) -> Callable[..., Any]:
    """``planner(specs, memory, layout="LBNHC")``: what vLLM's planner gives each of two ranks."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    config = engine_config(mla_model, {"enable_kvpp": True}, max_model_len=64)

    def run(specs: Specs, memory: int, layout: str = "LBNHC") -> Any:
        config.cache_config.kv_cache_layout = layout
        (first, second) = get_kv_cache_configs(config, [specs, dict(specs)], [memory, memory])
        assert first.num_blocks == second.num_blocks
        first.kv_cache_layout = layout  # as the engine core does
        return first

    return run


def allocate(config: Any, layout: str = "LBNHC") -> dict[str, torch.Tensor]:
    """vLLM's own allocation of a configuration."""
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    caches: dict[str, torch.Tensor] = allocate_kv_cache(
        config, torch.device("cpu"), KVCacheLayout[layout]
    )
    return caches


def write_block(cache: torch.Tensor, block: int, byte: int) -> None:
    """Fill one block of a layer's view with a byte."""
    pattern = torch.full((cache[block].numel() * cache.element_size(),), byte, dtype=torch.uint8)
    cache[block].copy_(pattern.view(cache.dtype).view_as(cache[block]))


def test_one_bundle_per_layer_with_main_and_indexer_of_different_sizes() -> None:
    targets, drafts = read_bundles(mixed_specs(), MIXED_DRAFTS)
    assert [bundle.layer for bundle in targets] == list(range(LAYERS))
    both = (MAIN + INDEXER, MAIN, MAIN + INDEXER, MAIN, MAIN + INDEXER)
    assert tuple(bundle.bytes_per_block for bundle in targets) == both
    assert targets[2].components == (
        Component(attn(2), MAIN),
        Component(indexer(2), INDEXER),
    )
    (draft,) = drafts
    assert draft.layer == DRAFT
    assert {component.name for component in draft.components} == MIXED_DRAFTS


def test_bundles_do_not_depend_on_the_order_of_the_specs() -> None:
    """Every rank must come to the same partition, whatever its dictionaries' order."""
    specs = mixed_specs()
    backwards = dict(reversed(specs.items()))
    assert read_bundles(specs, MIXED_DRAFTS) == read_bundles(backwards, MIXED_DRAFTS)


def test_page_sizes_are_those_of_vllm() -> None:
    """Padding and quantized layouts included: the size is the specification's own."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    padded = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        alignment=576,
    )
    ((bundle,), _) = read_bundles({attn(0): padded}, NO_DRAFTS)
    assert bundle.bytes_per_block == padded.page_size_bytes


def test_a_cache_that_is_no_mla_cache_is_named() -> None:
    specs = {**dense_specs(), attn(3): full_spec()}
    with pytest.raises(PlanError) as caught:
        read_bundles(specs, NO_DRAFTS)
    assert attn(3) in str(caught.value) and "FullAttentionSpec" in str(caught.value)
    assert "switch KVPP off" in str(caught.value)


def sliding_spec() -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=4, head_size=16, dtype=torch.float32, sliding_window=64
    )


def test_a_draft_with_blocks_of_its_own_is_named() -> None:
    specs = {**dense_specs(), attn(DRAFT): sliding_spec()}
    with pytest.raises(PlanError) as caught:
        read_bundles(specs, frozenset({attn(DRAFT)}))
    assert attn(DRAFT) in str(caught.value) and "SlidingWindowSpec" in str(caught.value)
    assert "Use a draft model with MLA" in str(caught.value)


def test_a_draft_of_full_attention_is_no_target() -> None:
    targets, (draft,) = read_bundles(eagle_specs(), frozenset({attn(DRAFT)}))
    assert len(targets) == LAYERS
    assert draft.components == (Component(attn(DRAFT), full_spec().page_size_bytes),)


def test_several_cache_groups_are_refused(planner: Callable[..., Any]) -> None:
    """The history of a step follows one list of blocks per request."""
    config = planner(dense_specs(), BLOCKS * MAIN * LAYERS)
    two = dataclasses.replace(config, kv_cache_groups=2 * config.kv_cache_groups)
    with pytest.raises(PlanError, match="2 cache groups"):
        place(two, layout_of(dense_specs(), NO_DRAFTS, 0))


def test_a_draft_that_shares_the_targets_cache_is_refused() -> None:
    """By the worker, as soon as the layers are known."""
    own, shared = _Layer(None), _Layer(attn(LAYERS - 1))
    check_own_caches({attn(0): own, attn(1): object()})
    worker = _Worker()
    worker.compilation_config = SimpleNamespace(
        static_forward_context={attn(0): own, attn(DRAFT): shared}
    )
    rank = KvppRank.__new__(KvppRank)
    rank._worker, rank._adapter = worker, Adapter032(worker)
    worker._kvpp = rank
    with pytest.raises(PlanError) as caught:
        worker.determine_available_memory()
    assert f"{attn(DRAFT)} uses the cache of {attn(LAYERS - 1)}" in str(caught.value)


@dataclasses.dataclass
class _Layer:
    kv_sharing_target_layer_name: str | None


class _Below:
    def determine_available_memory(self) -> int:
        return 1 << 30

    def get_kv_cache_spec(self) -> Specs:
        return dense_specs()


class _Worker(KvppWorkerMixin, _Below):
    compilation_config: Any


def test_two_block_sizes_are_refused_with_both() -> None:
    specs = {**dense_specs(), attn(2): mla_spec(64)}
    for read in (block_size_of, lambda specs: read_bundles(specs, NO_DRAFTS)):
        with pytest.raises(PlanError, match=r"\[16, 64\]"):
            read(specs)


def test_a_worker_without_caches_is_refused() -> None:
    with pytest.raises(PlanError, match="block size"):
        block_size_of({})
    assert block_size_of(dense_specs()) == BLOCK


def test_the_plan_is_contiguous_and_lower_ranks_take_the_remainder() -> None:
    for rank, owned in ((0, (0, 1, 2)), (1, (3, 4))):
        placement = plan(mixed_specs(), MIXED_DRAFTS, group(rank), KvppOptions())
        assert placement.owners == (0, 0, 0, 1, 1)
        assert placement.owned == owned
        assert (placement.rank, placement.ranks) == (rank, 2)
        assert placement.logical_bytes_per_block == sum(
            spec.page_size_bytes for spec in mixed_specs().values()
        )


def test_the_plan_follows_the_options() -> None:
    options = KvppOptions(ownership=OwnershipPolicy.BYTES, alignment_bytes=512)
    placement = plan(mixed_specs(), MIXED_DRAFTS, group(), options)
    assert placement.alignment == 512
    heavy = {attn(0): mla_spec(), **{indexer(n): indexer_spec() for n in range(1, 8)}}
    assert plan(heavy, NO_DRAFTS, group(), options).owners == (0, *[1] * 7)
    assert plan(heavy, NO_DRAFTS, group(), KvppOptions()).owners == (*[0] * 4, *[1] * 4)


def test_staging_that_cannot_hold_a_block_is_refused_with_both_sizes() -> None:
    for staging, fits in ((MAIN + INDEXER - 1, False), (MAIN + INDEXER, True), (0, True)):
        options = KvppOptions(staging_bytes=staging)
        if fits:
            plan(mixed_specs(), MIXED_DRAFTS, group(), options)
            continue
        with pytest.raises(PlanError) as caught:
            plan(mixed_specs(), MIXED_DRAFTS, group(), options)
        assert f"{staging:,}" in str(caught.value) and f"{MAIN + INDEXER:,}" in str(caught.value)
        assert "additional_config.kvpp.staging_bytes" in str(caught.value)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("memory", [2_000_003, 12_345_678])
def test_vllms_planner_arrives_at_the_kvpp_capacity(
    planner: Callable[..., Any], model: str, memory: int
) -> None:
    """Told blocks x logical bytes, the planner plans exactly these blocks: section 2.2."""
    make, drafts = MODELS[model]
    placement = plan(make(), drafts, group(), KvppOptions())
    blocks = blocks_that_fit(placement, memory)
    assert blocks == memory // placement.physical_bytes_per_block > 1
    assert planner(make(), blocks * placement.logical_bytes_per_block).num_blocks == blocks


def placed(
    planner: Callable[..., Any], model: str, rank: int, **options: Any
) -> tuple[Any, RankLayout]:
    """The planner's configuration of BLOCKS blocks, placed for one rank, and its layout."""
    make, drafts = MODELS[model]
    layout = layout_of(make(), drafts, rank, **options)
    config = planner(make(), BLOCKS * layout.placement.logical_bytes_per_block)
    return place(config, layout), layout


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("alignment", [1, 4096])
def test_vllms_views_lie_where_the_layout_says(
    planner: Callable[..., Any], model: str, rank: int, alignment: int
) -> None:
    """Offset, size and contiguity of every view, and one buffer of the budgeted size."""
    config, layout = placed(planner, model, rank, alignment_bytes=alignment)
    caches = allocate(config)
    buffer = backing_buffer(caches, layout)
    assert buffer.dtype is torch.int8 and buffer.numel() == layout.size
    assert set(caches) == set(layout.components) == set(MODELS[model][0]())
    for name, span in layout.components.items():
        view = caches[name]
        assert view.shape[0] == BLOCKS
        assert view.data_ptr() - buffer.data_ptr() == span.offset
        assert view.numel() * view.element_size() == span.size
        # What is broadcast; heads of a draft are seen through a permuted view.
        assert view.is_contiguous() or name in MODELS[model][1]
    for slot_or_target in (*layout.slots, *layout.targets, *layout.drafts):
        assert slot_or_target.offset % alignment == 0


def rest_of(config: Any) -> dict[str, Any]:
    """A configuration without its tensors."""
    fields = {field.name for field in dataclasses.fields(config)} - {"kv_cache_tensors"}
    return {name: getattr(config, name) for name in fields}


def test_placing_changes_nothing_but_the_tensors(planner: Callable[..., Any]) -> None:
    """And leaves the engine's own configuration as it is."""
    layout = layout_of(mixed_specs(), MIXED_DRAFTS, 0)
    config = planner(mixed_specs(), BLOCKS * layout.placement.logical_bytes_per_block)
    tensors = [dataclasses.replace(tensor) for tensor in config.kv_cache_tensors]
    result = place(config, layout)
    assert config.kv_cache_tensors == tensors
    assert rest_of(result) == rest_of(config)
    assert {tensor.size for tensor in result.kv_cache_tensors} == {layout.size}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rank", [0, 1])
def test_layers_alias_exactly_where_they_share_a_scratch_slot(
    planner: Callable[..., Any], model: str, rank: int
) -> None:
    """Write each cache in turn and look which others changed, byte by byte."""
    config, layout = placed(planner, model, rank)
    caches = allocate(config)
    buffer = backing_buffer(caches, layout)
    for writer, view in caches.items():
        buffer.zero_()
        for block in range(BLOCKS):
            write_block(view, block, 0xA5)
        touched = buffer != 0
        span = layout.components[writer]
        assert touched[span.offset : span.end].all()
        assert int(touched.sum()) == span.size  # nothing outside its span
        changed = {name for name, other in caches.items() if bytes_of(other).any()}
        assert changed == sharers(layout, writer)


def bytes_of(view: torch.Tensor) -> torch.Tensor:
    """A view's memory as bytes."""
    return view.contiguous().view(torch.uint8)


def sharers(layout: RankLayout, writer: str) -> set[str]:
    """Caches that a write to ``writer`` may change: itself, and others in its scratch slot whose
    bytes overlap. Worked out from slots and sizes, not from the spans under test."""
    placement = layout.placement
    home = next(
        (n for n, b in enumerate(placement.bundles) if writer in {c.name for c in b.components}),
        None,
    )
    if home is None or placement.owners[home] == placement.rank:
        return {writer}
    places: dict[str, tuple[int, int]] = {}  # (first byte in the slot, end)
    for ordinal, bundle in enumerate(placement.bundles):
        if placement.owners[ordinal] != placement.rank and ordinal % 2 == home % 2:
            start = 0
            for component in bundle.components:
                size = component.bytes_per_block * layout.num_blocks
                places[component.name] = (start, start + size)
                start += size
    first, end = places[writer]
    return {name for name, (start, stop) in places.items() if start < end and first < stop}


def test_slots_are_really_shared_in_these_tests() -> None:
    """Otherwise the aliasing test would hold for a layout without any scratch sharing."""
    layout = layout_of(dense_specs(), NO_DRAFTS, 1)
    assert sharers(layout, attn(0)) == {attn(0), attn(2)}
    assert sharers(layout, attn(3)) == {attn(3)}
    mixed = layout_of(mixed_specs(), MIXED_DRAFTS, 1)
    assert sharers(mixed, indexer(0)) == {indexer(0), indexer(2)}
    assert sharers(mixed, indexer(DRAFT)) == {indexer(DRAFT)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rank", [0, 1])
def test_blocks_do_not_touch_each_other(planner: Callable[..., Any], model: str, rank: int) -> None:
    """Every block of every owned or draft cache gets a byte of its own, and all are there then:
    component after component, block after block, as one broadcast of a bundle needs."""
    config, layout = placed(planner, model, rank)
    caches = allocate(config)
    buffer = backing_buffer(caches, layout)
    expected = torch.zeros_like(buffer)
    kept = [name for name in caches if layout.components[name].offset >= layout.slots[1].end]
    assert kept
    for number, name in enumerate(kept):
        span, page = layout.components[name], layout.components[name].size // BLOCKS
        for block in range(BLOCKS):
            byte = 1 + (number * BLOCKS + block) % 126
            write_block(caches[name], block, byte)
            start = span.offset + block * page
            expected[start : start + page] = byte
    assert torch.equal(buffer, expected)


def test_a_rank_that_owns_nothing_has_scratch_and_drafts_alone(
    planner: Callable[..., Any],
) -> None:
    make, drafts = MODELS["sparse with a draft"]
    layout = layout_of(make(), drafts, rank=7, ranks=8)
    assert layout.placement.owned == ()
    config = place(planner(make(), BLOCKS * layout.placement.logical_bytes_per_block), layout)
    buffer = backing_buffer(allocate(config), layout)
    assert buffer.numel() == BLOCKS * 3 * (MAIN + INDEXER)


def test_a_layer_that_the_engine_did_not_plan_is_named(planner: Callable[..., Any]) -> None:
    """As when a connector or a draft model changed the specs after the budget."""
    specs = dense_specs()
    config = planner(specs, BLOCKS * MAIN * LAYERS)
    fewer = {name: spec for name, spec in specs.items() if name != attn(1)}
    more = {**specs, attn(9): mla_spec()}
    for budgeted, odd in ((fewer, attn(1)), (more, attn(9))):
        with pytest.raises(PlanError) as caught:
            place(config, layout_of(budgeted, NO_DRAFTS, 0))
        assert odd in str(caught.value)
        assert f"planned {LAYERS} caches" in str(caught.value)
        assert f"budgeted {len(budgeted)}" in str(caught.value)


def test_a_block_outermost_layout_is_refused_with_what_to_set(
    planner: Callable[..., Any],
) -> None:
    config = planner(dense_specs(), BLOCKS * MAIN * LAYERS, layout="BLNHC")
    with pytest.raises(PlanError) as caught:
        place(config, layout_of(dense_specs(), NO_DRAFTS, 0))
    assert "BLNHC" in str(caught.value)
    assert "VLLM_KV_CACHE_LAYOUT=LBNHC" in str(caught.value)


Caches = Mapping[str, torch.Tensor]


def _other_memory(caches: Caches) -> Caches:
    return {**caches, attn(2): torch.zeros_like(caches[attn(2)])}


def _swapped(caches: Caches) -> Caches:
    return {**caches, attn(0): caches[attn(1)], attn(1): caches[attn(0)]}


@pytest.mark.parametrize("change", [_other_memory, _swapped])
def test_a_view_that_lies_elsewhere_is_named(
    planner: Callable[..., Any], change: Callable[[Caches], Caches]
) -> None:
    """A broadcast must never go to memory that the layers do not read."""
    config, layout = placed(planner, "dense", 0)
    with pytest.raises(PlanError, match=r"the cache of model\.layers\.\d\.self_attn\.attn lies at"):
        backing_buffer(change(allocate(config)), layout)


def test_memory_of_another_size_is_refused_with_both(planner: Callable[..., Any]) -> None:
    config, layout = placed(planner, "dense", 0)
    larger = build_layout(layout.placement, BLOCKS + 1)
    with pytest.raises(PlanError) as caught:
        backing_buffer(allocate(config), larger)
    assert f"{layout.size:,}" in str(caught.value) and f"{larger.size:,}" in str(caught.value)


def test_vllms_own_placement_is_not_taken_for_ours(planner: Callable[..., Any]) -> None:
    """If the placed configuration were ignored, start-up must end."""
    layout = layout_of(dense_specs(), NO_DRAFTS, 0)
    config = planner(dense_specs(), BLOCKS * MAIN * LAYERS)
    with pytest.raises(PlanError):
        backing_buffer(allocate(config), layout)
