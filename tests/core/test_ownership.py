"""Section 2.1: bundles, and who keeps them.

Field report 3.2: one number for three kinds of layer index.
"""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpp_core.bundles import Component, LayerBundle, group_bundles, largest_bytes_per_block
from kvpp_core.errors import PlanError
from kvpp_core.ownership import OwnershipPolicy, assign_owners
from tests.core.strategies import bundles, sized

FAST = settings(deadline=None, max_examples=200)


@FAST
@given(bundles(), st.integers(1, 16), st.sampled_from(OwnershipPolicy))
def test_every_bundle_has_one_owner_and_shares_are_contiguous(
    targets: tuple[LayerBundle, ...], ranks: int, policy: OwnershipPolicy
) -> None:
    owners = assign_owners(targets, ranks, policy)
    assert len(owners) == len(targets)
    assert all(0 <= owner < ranks for owner in owners)
    assert all(left <= right for left, right in pairwise(owners))


@FAST
@given(st.integers(0, 100), st.integers(1, 16))
def test_by_count_shares_differ_by_one_and_lower_ranks_take_the_remainder(
    layers: int, ranks: int
) -> None:
    owners = assign_owners(sized([1] * layers), ranks)
    counts = [owners.count(rank) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("layers", "ranks", "owners"),
    [
        (8, 3, (0, 0, 0, 1, 1, 1, 2, 2)),
        (8, 10, (0, 1, 2, 3, 4, 5, 6, 7)),
        (6, 1, (0,) * 6),
        (0, 4, ()),
    ],
)
def test_examples_of_the_specification(layers: int, ranks: int, owners: tuple[int, ...]) -> None:
    assert assign_owners(sized([100] * layers), ranks) == owners


@FAST
@given(st.lists(st.integers(1, 9) | st.integers(1, 3000), max_size=8), st.integers(1, 5))
@example([1, 5, 2, 3], 3)  # the most even split has a larger largest share: 6, 2, 3
@example([], 3)
def test_by_bytes_the_largest_share_is_the_least_possible_and_the_others_are_even(
    sizes: list[int], ranks: int
) -> None:
    """Against all contiguous splits."""
    owners = assign_owners(sized(sizes), ranks, OwnershipPolicy.BYTES)
    shares = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    ]
    splits = [
        [sum(sizes[a:b]) for a, b in pairwise((0, *cuts, len(sizes)))]
        for cuts in combinations_with_replacement(range(len(sizes) + 1), ranks - 1)
    ]
    least = min(map(max, splits))
    assert max(shares) == least
    assert _unevenness(shares) == min(_unevenness(s) for s in splits if max(s) == least)


def _unevenness(shares: list[int]) -> int:
    return sum(share * share for share in shares)


@FAST
@given(st.integers(0, 40), st.integers(1, 9))
def test_by_bytes_equal_bundles_are_split_as_by_count(layers: int, ranks: int) -> None:
    targets = sized([7] * layers)
    assert assign_owners(targets, ranks, OwnershipPolicy.BYTES) == assign_owners(targets, ranks)


@FAST
@given(bundles(), st.randoms(use_true_random=False))
def test_bundles_do_not_depend_on_the_order_in_which_caches_are_found(
    targets: tuple[LayerBundle, ...], order: Random
) -> None:
    pairs = [(bundle.layer, part) for bundle in targets for part in bundle.components]
    shuffled = list(pairs)
    order.shuffle(shuffled)
    grouped = group_bundles(shuffled)
    assert grouped == group_bundles(pairs)
    assert [bundle.layer for bundle in grouped] == sorted({layer for layer, _ in pairs})
    assert sorted((b.layer, c) for b in grouped for c in b.components) == sorted(pairs)


@FAST
@given(bundles())
def test_sizes_add_up(targets: tuple[LayerBundle, ...]) -> None:
    for bundle in targets:
        assert bundle.bytes_per_block == sum(c.bytes_per_block for c in bundle.components)
    assert largest_bytes_per_block(targets) == max(
        [bundle.bytes_per_block for bundle in targets], default=0
    )


def test_bundles_that_cannot_be_are_refused_by_name() -> None:
    a, b = Component("a", 1), Component("b", 2)
    with pytest.raises(PlanError, match="component 'a' has 0 bytes"):
        Component("a", 0)
    with pytest.raises(PlanError, match="component 'a' has -1 bytes"):
        Component("a", -1)
    with pytest.raises(PlanError, match="layer 3 has no cache components"):
        LayerBundle(3, ())
    with pytest.raises(PlanError, match=r"layer 3 names a component twice: \['a', 'b', 'a'\]"):
        LayerBundle(3, (a, b, a))
    with pytest.raises(PlanError, match="'a' belongs to layer 1 and to layer 2"):
        group_bundles([(1, a), (1, b), (2, a)])
    for policy in OwnershipPolicy:
        with pytest.raises(PlanError, match="a KVPP group of 0 ranks"):
            assign_owners(sized([1]), 0, policy)
