"""Which mode a broadcast takes: the traffic it is allowed, and the cost model behind it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.errors import PlanError
from kvpp_core.history import History, find_runs
from kvpp_core.policy import (
    BroadcastPolicy,
    CostModel,
    Mode,
    blocks_per_message,
    choose_mode,
    mode_bytes,
)
from tests.core.strategies import bundles

FAST = settings(deadline=None, max_examples=300)

ONE_BUNDLE = bundles(min_layers=1, max_layers=1).map(lambda found: found[0])
COSTS = st.builds(
    CostModel,
    latency=st.floats(1e-6, 1e-2),
    per_range=st.floats(1e-6, 1e-2),
    bandwidth=st.floats(1e8, 1e12),
    pack_bandwidth=st.floats(1e8, 1e12),
)
STAGING = st.integers(0, 100_000)


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Any active blocks of a pool of up to 60."""
    pool = draw(st.integers(1, 60))
    return History.of(sorted(draw(st.sets(st.integers(0, pool - 1)))), pool)


@FAST
@given(ONE_BUNDLE, histories(), COSTS, STAGING)
def test_auto_moves_the_active_bytes_up_to_half_of_the_pool_and_never_more_than_full(
    bundle: LayerBundle, history: History, cost: CostModel, staging: int
) -> None:
    """Whatever the backend costs."""
    mode = choose_mode(bundle, history, BroadcastPolicy.AUTO, cost, staging)
    moved = mode_bytes(mode, bundle, history)
    assert moved <= mode_bytes(Mode.FULL, bundle, history)
    if 2 * len(history.blocks) <= history.num_blocks:
        assert moved <= 1.05 * len(history.blocks) * bundle.bytes_per_block


@FAST
@given(ONE_BUNDLE, histories(), COSTS, STAGING)
def test_auto_and_active_take_the_cheapest_mode_they_may(
    bundle: LayerBundle, history: History, cost: CostModel, staging: int
) -> None:
    per_message = blocks_per_message(bundle, staging)
    messages = {Mode.RUNS: len(history.runs) * len(bundle.components)}
    if per_message:
        messages[Mode.PACKED] = -(-len(history.blocks) // per_message)
    for policy in (BroadcastPolicy.ACTIVE, BroadcastPolicy.AUTO):
        if policy is BroadcastPolicy.AUTO and 2 * len(history.blocks) > history.num_blocks:
            messages[Mode.FULL] = 1
        chosen = choose_mode(bundle, history, policy, cost, staging)
        if not history.blocks:
            assert chosen is Mode.NONE
            continue
        seconds = {
            mode: cost.seconds(mode, mode_bytes(mode, bundle, history), count)
            for mode, count in messages.items()
        }
        assert seconds[chosen] == min(seconds.values())


@FAST
@given(ONE_BUNDLE, histories(), COSTS, STAGING, st.sampled_from(BroadcastPolicy))
def test_a_forced_policy_is_kept_and_no_history_moves_nothing(
    bundle: LayerBundle, history: History, cost: CostModel, staging: int, policy: BroadcastPolicy
) -> None:
    mode = choose_mode(bundle, history, policy, cost, staging)
    if not history.blocks:
        assert mode is Mode.NONE
        assert mode_bytes(mode, bundle, history) == 0
    elif policy is BroadcastPolicy.PACKED:
        can_pack = staging >= bundle.bytes_per_block
        assert mode is (Mode.PACKED if can_pack else Mode.RUNS)
    elif policy in (BroadcastPolicy.FULL, BroadcastPolicy.RUNS):
        assert mode.value == policy.value
    elif policy is BroadcastPolicy.ACTIVE:
        assert mode in (Mode.RUNS, Mode.PACKED)


@FAST
@given(st.sets(st.integers(0, 200)))
def test_runs_are_maximal_and_cover_the_blocks_exactly(ids: set[int]) -> None:
    runs = find_runs(sorted(ids))
    assert [block for first, length in runs for block in range(first, first + length)] == sorted(
        ids
    )
    for (first, length), (following, _) in pairwise(runs):
        assert first + length < following


@pytest.mark.parametrize(
    "cost",
    [
        CostModel(0.44e-3, 0.18e-3, 2.8e9, 4.4e9),  # gloo over loopback, two ranks
        CostModel(1.0e-3, 0.77e-3, 1.0e9, 2.1e9),  # four
        CostModel(30e-6, 15e-6, 150e9, 600e9),  # as fast as NVLink
    ],
    ids=str,
)
def test_auto_uses_every_mode_where_it_is_best(cost: CostModel) -> None:
    """One run: a message per component. Scattered blocks: packed. The whole pool: full."""
    main = LayerBundle(0, (Component("main", 83_968),))
    whole = LayerBundle(1, tuple(Component(f"part {i}", 64) for i in range(4)))
    staging = 64 << 20
    one_run = History.of(range(100, 130), 10_000)
    scattered = History.of(range(0, 4_000, 16), 10_000)
    everything = History.of(range(10_000), 10_000)
    auto = BroadcastPolicy.AUTO
    assert choose_mode(main, one_run, auto, cost, staging) is Mode.RUNS
    assert choose_mode(main, scattered, auto, cost, staging) is Mode.PACKED
    assert choose_mode(whole, everything, auto, cost, staging) is Mode.FULL


def test_blocks_outside_the_pool_are_refused() -> None:
    for blocks in ([4], [-1, 2], [0, 1, 2, 3, 4]):
        with pytest.raises(PlanError, match=r"are outside a pool of 4"):
            History.of(blocks, 4)
