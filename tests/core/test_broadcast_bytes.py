"""S12: every byte of every rank's memory after every acquire, on real gloo groups.

What `tests.core.byte_check` compares, for all policies, pools, staging sizes and random models.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest import mock

import pytest

from kvpp_core import transfer
from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.layout import ScratchPolicy
from kvpp_core.policy import BroadcastPolicy
from kvpp_core.transfer import BundleTransfer
from tests.core.byte_check import Seen, check_step, check_step_without_history
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rank_memory import ALIGNED, UNALIGNED, Model, uneven_model
from tests.core.rig import DeviceKind, make_rig

NUM_BLOCKS = 12
ACTIVE_SETS: dict[str, tuple[int, ...]] = {
    "one block": (5,),
    "the last block": (11,),
    "one run": (3, 4, 5, 6),
    "scattered": (0, 2, 3, 7, 11),
    "most": (0, 1, 2, 3, 5, 6, 7, 9, 10, 11),
    "all": tuple(range(12)),
}


def run_steps(
    rank: Rank,
    policy: BroadcastPolicy,
    layers: int,
    groups: Sequence[Sequence[int]] | None = None,
    staging_blocks: float = 2.5,
    poison_scratch: bool = False,
    guard: int = UNALIGNED,
    kind: DeviceKind = "cpu",
) -> Seen:
    """A step for each set of active blocks, and after each one a step without history."""
    r = make_rig(
        rank,
        kind,
        model=uneven_model(layers),
        groups=groups,
        policy=policy,
        num_blocks=NUM_BLOCKS,
        staging_blocks=staging_blocks,
        poison_scratch=poison_scratch,
        guard=guard,
    )
    seen = Seen([], [])
    for generation, (name, active) in enumerate(ACTIVE_SETS.items(), start=2):
        check_step(r, name, active, generation, seen)
        check_step_without_history(r, name, seen)
    rank.barrier()
    r.close()
    return seen


def run_without_broadcasts(rank: Rank, layers: int) -> Seen:
    """`run_steps` with poisoned scratch and transfers that do nothing."""
    with mock.patch.object(BundleTransfer, "start", lambda *_: None):
        return run_steps(rank, BroadcastPolicy.AUTO, layers, poison_scratch=True)


def run_random_models(rank: Rank, seed: int, cases: int) -> Seen:
    """Random bundles, alignments, pools, staging sizes and policies; three steps each."""
    seen = Seen([], [])
    draw = random.Random(seed)  # the same on every rank
    for case in range(cases):
        blocks = draw.randint(1, 9)
        r = make_rig(
            rank,
            "cpu",
            model=_random_model(draw),
            policy=draw.choice(list(BroadcastPolicy)),
            num_blocks=blocks,
            staging_blocks=draw.choice([0.0, 0.5, 1.0, 3.7, 20.0]),
            guard=draw.choice([ALIGNED, ALIGNED, UNALIGNED, 4, 2]),
        )
        for generation in range(2, 5):
            active = sorted(draw.sample(range(blocks), draw.randint(1, blocks)))
            name = f"case {case} of seed {seed} ({r.settings.policy}, {active} of {blocks})"
            with mock.patch.object(transfer, "_SLICE_BYTES", draw.choice([1, 100, 2 << 20])):
                check_step(r, name, active, generation, seen)
        rank.barrier()
        r.close()
    return seen


def run_sliced(rank: Rank, kind: DeviceKind, staging_blocks: float) -> Seen:
    """`run_steps` with every packed message in as many slices as there may be."""
    with mock.patch.object(transfer, "_SLICE_BYTES", 1):
        return run_steps(rank, BroadcastPolicy.PACKED, 5, staging_blocks=staging_blocks, kind=kind)


def _random_model(draw: random.Random) -> Model:
    bundles = []
    for layer in range(draw.randint(1, 7)):
        word = draw.choice([1, 2, 4, 8])  # bytes; whole blocks may be copied in such words
        parts = [
            Component(f"{layer}.{part}", word * draw.randint(1, 50))
            for part in range(draw.randint(1, 4))
        ]
        bundles.append(LayerBundle(layer, tuple(parts)))
    drafts = (LayerBundle(99, (Component("draft", draw.randint(1, 200)),)),)
    alignment, scratch = draw.choice([1, 1, 7, 64]), draw.choice(list(ScratchPolicy))
    return Model(tuple(bundles), drafts[: draw.randint(0, 1)], alignment, scratch)


POLICIES = list(BroadcastPolicy)


@pytest.mark.parametrize("guard", [ALIGNED, UNALIGNED])
@pytest.mark.parametrize("policy", POLICIES)
def test_two_ranks_hold_the_owners_bytes_and_touch_no_other(
    world2: GlooWorld, policy: BroadcastPolicy, guard: int
) -> None:
    assert world2.run(run_steps, policy, 5, guard=guard) == [Seen([], [])] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_four_ranks_hold_the_owners_bytes_and_touch_no_other(
    world4: GlooWorld, policy: BroadcastPolicy
) -> None:
    assert world4.run(run_steps, policy, 7) == [Seen([], [])] * 4


@pytest.mark.parametrize("staging_blocks", [1.0, 3.0, 20.0])
def test_slices_of_packed_blocks_do_not_mix(world4: GlooWorld, staging_blocks: float) -> None:
    assert world4.run(run_sliced, "cpu", staging_blocks) == [Seen([], [])] * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_owns_nothing_receives_every_layer(
    world4: GlooWorld, policy: BroadcastPolicy
) -> None:
    """Three layers on four ranks: the fourth has scratch and drafts only."""
    assert world4.run(run_steps, policy, 3) == [Seen([], [])] * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_two_groups_beside_each_other_do_not_mix(
    world4: GlooWorld, policy: BroadcastPolicy
) -> None:
    """Group ranks are not global ranks: the stages are ranks 0, 2 and 3, 1."""
    results = world4.run(run_steps, policy, 5, groups=[[0, 2], [3, 1]])
    assert results == [Seen([], [])] * 4


@pytest.mark.parametrize("staging_blocks", [0.0, 0.9, 1.0, 100.0])
def test_any_amount_of_staging_will_do(world2: GlooWorld, staging_blocks: float) -> None:
    """From none (packed falls back to runs) to a whole bundle in one message."""
    results = world2.run(run_steps, BroadcastPolicy.PACKED, 5, staging_blocks=staging_blocks)
    assert results == [Seen([], [])] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_poisoned_scratch_holds_what_was_broadcast_in_this_step_and_poison(
    world2: GlooWorld, policy: BroadcastPolicy
) -> None:
    """With ``poison_scratch`` bytes of an earlier step cannot be read by mistake."""
    results = world2.run(run_steps, policy, 5, poison_scratch=True)
    assert results == [Seen([], [])] * 2


def test_without_broadcasts_the_checker_finds_wrong_bytes(world2: GlooWorld) -> None:
    """So the tests above can fail: with every set of active blocks, at every remote layer."""
    for rank, seen in enumerate(world2.run(run_without_broadcasts, 5)):
        for name in ACTIVE_SETS:
            for layer in (3, 4) if rank == 0 else (0, 1, 2):
                assert any(found.startswith(f"{name}, layer {layer}:") for found in seen.bytes)
        assert all("0 bytes sent, not what" in found for found in seen.traffic)


@pytest.mark.parametrize("seed", range(4))
def test_random_models_on_two_ranks(world2: GlooWorld, seed: int) -> None:
    assert world2.run(run_random_models, seed, 15) == [Seen([], [])] * 2


@pytest.mark.parametrize("seed", range(2))
def test_random_models_on_four_ranks(world4: GlooWorld, seed: int) -> None:
    assert world4.run(run_random_models, 100 + seed, 15) == [Seen([], [])] * 4
