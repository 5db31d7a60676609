"""S12: every byte of every rank's memory after every acquire, on real gloo groups.

At each acquire the rank's whole allocation is compared with a model of it: own bundles, drafts,
both scratch slots and the sentinels around the buffer. Only the slot that is being filled for the
next layer is left out, and it was poisoned just before its transfer was started, so that a byte
too many is seen as well as a byte too few.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import pytest

from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.layout import SCRATCH_SLOTS
from kvpp_core.policy import BroadcastPolicy, History, Mode, choose_mode, mode_bytes
from kvpp_core.transfer import BundleTransfer
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rank_memory import ALIGNED, UNALIGNED, Model, uneven_model
from tests.core.rig import Rig, make_rig

NUM_BLOCKS = 12
ACTIVE_SETS: dict[str, tuple[int, ...]] = {
    "one block": (5,),
    "the last block": (11,),
    "one run": (3, 4, 5, 6),
    "scattered": (0, 2, 3, 7, 11),
    "most": (0, 1, 2, 3, 5, 6, 7, 9, 10, 11),
    "all": tuple(range(12)),
}


class Seen(NamedTuple):
    """What a rank found wrong."""

    bytes: list[str]
    traffic: list[str]


def run_steps(
    rank: Rank,
    policy: BroadcastPolicy,
    layers: int,
    groups: Sequence[Sequence[int]] | None = None,
    staging_blocks: float = 2.5,
    poison_scratch: bool = False,
    guard: int = UNALIGNED,
) -> Seen:
    """A step for each set of active blocks, and after each one a step without history."""
    r = make_rig(
        rank,
        "cpu",
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


def check_step(r: Rig, name: str, active: Sequence[int], generation: int, seen: Seen) -> None:
    """Run one step; compare the whole memory at each acquire, and the traffic at the end."""
    memory, sent_before = r.memory, r.group.sent_bytes
    stats_before = r.pipeline.stats.bytes.total()
    modes = [
        choose_mode(
            bundle,
            History.of(active, memory.num_blocks),
            r.settings.policy,
            r.settings.cost,
            r.staging_bytes,
        )
        for bundle in memory.placement.bundles
    ]
    memory.store_owned(generation)
    memory.store_drafts(generation)
    for slot in range(SCRATCH_SLOTS):
        if r.settings.poison_scratch:
            memory.expect_poison(slot)
        else:
            memory.poison_slot(slot)
    r.pipeline.begin(active)
    for ordinal, mode in enumerate(modes):
        filling = memory.layout.slot_of(ordinal + 1) if ordinal + 1 < r.layers else None
        if filling is not None and not r.settings.poison_scratch:
            memory.poison_slot(filling)  # free: the layer before this one has been computed
        r.acquire(ordinal)
        if not r.owns(ordinal):
            full = mode is Mode.FULL
            memory.expect(ordinal, range(memory.num_blocks) if full else active, generation)
        seen.bytes.extend(
            f"{name}, layer {ordinal}: {found}" for found in memory.difference(filling)
        )
    r.pipeline.end()
    seen.bytes.extend(f"{name}, at the end: {found}" for found in memory.difference())
    sent = r.group.sent_bytes - sent_before
    counted = r.pipeline.stats.bytes.total() - stats_before
    seen.traffic.extend(_traffic(r, name, active, modes, sent, counted))


def _traffic(
    r: Rig, name: str, active: Sequence[int], modes: Sequence[Mode], sent: int, counted: int
) -> list[str]:
    """What is wrong with the bytes that were handed to the group in one step."""
    bundles, blocks = r.memory.placement.bundles, r.memory.num_blocks
    history = History.of(active, blocks)
    modelled = sum(mode_bytes(m, b, history) for m, b in zip(modes, bundles, strict=True))
    per_block = sum(bundle.bytes_per_block for bundle in bundles)
    policy = r.settings.policy
    rules = {
        "not what the statistics count": sent == counted,
        "not what the modes say": sent == modelled,
        "more than the full bundles": sent <= blocks * per_block,
        "not the full bundles": policy is not BroadcastPolicy.FULL or sent == blocks * per_block,
        "not just the active blocks": policy in (BroadcastPolicy.FULL, BroadcastPolicy.AUTO)
        or sent == len(active) * per_block,
        "over 1.05 x the active blocks": policy is not BroadcastPolicy.AUTO
        or 2 * len(active) > blocks
        or sent <= 1.05 * len(active) * per_block,
    }
    return [f"{name}: {sent} bytes sent, {rule}" for rule, holds in rules.items() if not holds]


def check_step_without_history(r: Rig, name: str, seen: Seen) -> None:
    """Nothing moves, nothing is counted, no byte of memory changes."""
    sent, counted = len(r.group.sent), r.pipeline.stats.snapshot()
    r.pipeline.begin(())
    for ordinal in range(r.layers):
        r.acquire(ordinal)
    r.pipeline.end()
    seen.bytes.extend(f"after {name}, no history: {found}" for found in r.memory.difference())
    if len(r.group.sent) != sent:
        seen.traffic.append(f"after {name}: a step without history sent something")
    counted["steps"] = r.pipeline.stats.steps
    if r.pipeline.stats.snapshot() != counted:
        seen.traffic.append(f"after {name}: a step without history was counted")


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
            check_step(r, name, active, generation, seen)
        rank.barrier()
        r.close()
    return seen


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
    return Model(tuple(bundles), drafts[: draw.randint(0, 1)], draw.choice([1, 1, 7, 64]))


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
