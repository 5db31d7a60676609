"""Sections 2.1 and 2.2: where every byte of a rank's memory lies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.capacity import blocks_that_fit
from kvpp_core.errors import PlanError
from kvpp_core.layout import SCRATCH_SLOTS, ByteRange, Placement, RankLayout, build_layout
from tests.core.strategies import placements, sized

FAST = settings(deadline=None, max_examples=200)
BLOCKS = st.integers(0, 9)


def _regions(layout: RankLayout) -> list[ByteRange]:
    """What takes memory of its own: scratch slots, own bundles, drafts."""
    own = [layout.targets[ordinal] for ordinal in layout.placement.owned]
    return [*layout.slots, *own, *layout.drafts]


@FAST
@given(placements(), BLOCKS)
def test_components_follow_each_other_inside_their_bundle(
    placement: Placement, blocks: int
) -> None:
    layout = build_layout(placement, blocks)
    every_bundle = zip(
        (*placement.bundles, *placement.drafts), (*layout.targets, *layout.drafts), strict=True
    )
    for bundle, span in every_bundle:
        offset = span.offset
        for component in bundle.components:
            expected = ByteRange(offset, component.bytes_per_block * blocks)
            assert layout.components[component.name] == expected
            offset = expected.end
        assert offset == span.end


@FAST
@given(placements(), BLOCKS)
def test_regions_do_not_overlap_and_lie_inside_the_buffer(
    placement: Placement, blocks: int
) -> None:
    layout = build_layout(placement, blocks)
    end = 0
    for region in sorted(span for span in _regions(layout) if span.size):
        assert region.offset >= end
        end = region.end
    assert end <= layout.size


@FAST
@given(placements(), BLOCKS)
def test_components_overlap_only_when_their_bundles_share_a_scratch_slot(
    placement: Placement, blocks: int
) -> None:
    layout = build_layout(placement, blocks)
    slot_of = {
        component.name: layout.slot_of(ordinal)
        for ordinal, bundle in enumerate(placement.bundles)
        for component in bundle.components
    }
    layer_of = {
        component.name: bundle.layer
        for bundle in placement.bundles
        for component in bundle.components
    }
    spans = sorted(layout.components.items(), key=lambda item: item[1])
    for i, (left, a) in enumerate(spans):
        for right, b in spans[i + 1 :]:
            if b.offset >= a.end:
                break
            assert slot_of.get(left) is not None
            assert slot_of[left] == slot_of.get(right)
            assert layer_of[left] != layer_of[right]


@FAST
@given(placements(), BLOCKS)
def test_a_bundle_of_another_rank_lies_in_slot_ordinal_modulo_two(
    placement: Placement, blocks: int
) -> None:
    layout = build_layout(placement, blocks)
    assert len(layout.slots) == SCRATCH_SLOTS == 2
    for ordinal, (bundle, span) in enumerate(zip(placement.bundles, layout.targets, strict=True)):
        assert span.size == bundle.bytes_per_block * blocks
        if placement.owners[ordinal] == placement.rank:
            assert layout.slot_of(ordinal) is None
        else:
            assert layout.slot_of(ordinal) == ordinal % 2
            assert span.offset == layout.slots[ordinal % 2].offset
            assert span.size <= layout.slots[ordinal % 2].size


@FAST
@given(placements(), BLOCKS)
def test_the_size_is_the_formula_plus_less_than_one_alignment_per_region(
    placement: Placement, blocks: int
) -> None:
    layout = build_layout(placement, blocks)
    formula = blocks * placement.physical_bytes_per_block
    if placement.alignment == 1:
        assert layout.size == formula
    padding = layout.size - formula
    assert 0 <= padding <= (placement.alignment - 1) * len(_regions(layout))


@FAST
@given(placements(), BLOCKS)
def test_every_region_starts_at_a_multiple_of_the_alignment(
    placement: Placement, blocks: int
) -> None:
    for span in _regions(build_layout(placement, blocks)):
        assert span.size == 0 or span.offset % placement.alignment == 0


@FAST
@given(placements(), st.integers(0, 500_000))
def test_the_blocks_that_fit_fit_and_one_more_would_not(
    placement: Placement, available: int
) -> None:
    """What is promised (the budget) is what is allocated (the layout)."""
    if placement.physical_bytes_per_block == 0:
        with pytest.raises(PlanError, match="neither target nor draft layers"):
            blocks_that_fit(placement, available)
        return
    blocks = blocks_that_fit(placement, available)
    assert build_layout(placement, blocks).size <= available
    assert build_layout(placement, blocks + 1).size > available


@FAST
@given(placements())
def test_one_builder_gives_the_bytes_per_block_of_the_budget(placement: Placement) -> None:
    assert build_layout(placement, 1).size >= placement.physical_bytes_per_block
    assert placement.logical_bytes_per_block == sum(
        bundle.bytes_per_block for bundle in (*placement.bundles, *placement.drafts)
    )


def test_nothing_fits_into_no_memory() -> None:
    placement = Placement(sized([10, 10]), (0, 1), 2, 0)
    assert blocks_that_fit(placement, 0) == 0
    assert blocks_that_fit(placement, -5) == 0
    assert blocks_that_fit(placement, 29) == 0
    assert blocks_that_fit(placement, 30) == 1


def test_placements_that_cannot_be_are_refused_by_value() -> None:
    targets = sized([10, 20])
    with pytest.raises(PlanError, match="2 bundles but 1 owners"):
        Placement(targets, (0,), 2, 0)
    with pytest.raises(PlanError, match="rank 2 is not in a group of 2"):
        Placement(targets, (0, 1), 2, 2)
    with pytest.raises(PlanError, match="rank -1 is not in a group of 2"):
        Placement(targets, (0, 1), 2, -1)
    with pytest.raises(PlanError, match=r"owners \(0, 2\) name a rank outside a group of 2"):
        Placement(targets, (0, 2), 2, 0)
    with pytest.raises(PlanError, match="alignment of 0 bytes"):
        Placement(targets, (0, 1), 2, 0, alignment=0)
    with pytest.raises(PlanError, match="a KV cache of -1 blocks"):
        build_layout(Placement(targets, (0, 1), 2, 0), -1)
    twice = LayerBundle(9, (Component("0.kv", 1),))
    with pytest.raises(PlanError, match=r"component '0\.kv' is placed twice"):
        build_layout(Placement(targets, (0, 1), 2, 0, (twice,)), 1)
