"""Section 2.2: how many blocks fit, against the formula and against published deployments."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.capacity import DeploymentCapacity, StageCapacity, deployment, stage_capacity
from kvpp_core.errors import PlanError
from kvpp_core.layout import ScratchPolicy
from kvpp_core.ownership import OwnershipPolicy
from tests.core.strategies import bundles, sized

MIB = 1 << 20


def glm_5_2(first: int = 0, last: int = 78) -> tuple[LayerBundle, ...]:
    """GLM-5.2 on an A5, block of 128 tokens: bf16 main, LI-C8 indexer with fp32 scale.

    A layer has an indexer where max(i - 2, 0) % 4 == 0: 21 of 78 layers.
    """
    stage = []
    for layer in range(first, last):
        parts = [Component(f"{layer}.k", 131_072), Component(f"{layer}.rope", 16_384)]
        if max(layer - 2, 0) % 4 == 0:
            parts += [Component(f"{layer}.indexer", 16_384), Component(f"{layer}.scale", 512)]
        stage.append(LayerBundle(layer, tuple(parts)))
    return tuple(stage)


@pytest.mark.parametrize(("draft_bytes", "drafts"), [(0, 0), (700, 1), (700, 2)])
@pytest.mark.parametrize(
    ("layers", "ranks", "owned"), [(6, 2, 3), (7, 2, 4), (12, 2, 6), (7, 3, 3), (8, 3, 3)]
)
def test_the_capacity_is_the_formula_to_the_block(
    layers: int, ranks: int, owned: int, draft_bytes: int, drafts: int
) -> None:
    """floor(memory / (owned bundles + drafts + 2 x largest bundle)), ``owned`` of rank 0."""
    size, memory = 1_000, 1_000_003
    stage = stage_capacity(
        0, sized([size] * layers), _drafts(drafts, draft_bytes), ranks=ranks, memory=memory
    )
    extra = drafts * draft_bytes
    assert stage.blocks_on == memory // (owned * size + extra + 2 * size)
    assert stage.blocks_off == memory // (layers * size + extra)
    assert stage.binding_rank == 0


@settings(deadline=None, max_examples=100)
@given(
    bundles(min_layers=1),
    bundles(max_layers=2, prefix="drafts"),
    st.integers(1, 8),
    st.integers(1, 10**7),
    st.sampled_from(OwnershipPolicy),
)
def test_the_rank_with_the_least_room_decides(
    targets: tuple[LayerBundle, ...],
    drafts: tuple[LayerBundle, ...],
    ranks: int,
    memory: int,
    policy: OwnershipPolicy,
) -> None:
    stage = stage_capacity(3, targets, drafts, ranks=ranks, memory=memory, policy=policy)
    sizes = {bundle.layer: bundle.bytes_per_block for bundle in targets}
    fixed = sum(draft.bytes_per_block for draft in drafts) + 2 * max(sizes.values())
    expected = [fixed + sum(sizes[layer] for layer in owned) for owned in stage.owned_layers]
    assert list(stage.bytes_per_block_on) == expected
    assert stage.bytes_per_block_on[stage.binding_rank] == max(expected)
    assert stage.blocks_on == memory // max(expected)
    assert sorted(layer for owned in stage.owned_layers for layer in owned) == list(stage.layers)


def test_glm_5_2_tp8_is_as_published() -> None:
    """Byte figures to the byte; with 300 MiB for the communicator the measured ratio to 0.5%."""
    stage = stage_capacity(0, glm_5_2(), (), ranks=8, memory=21_768_000_000)
    assert stage.bytes_per_block_off == 11_856_384
    assert max(stage.bytes_per_block_on) == 1_870_848
    assert stage.binding_rank == 0
    assert stage.owned_layers[0] == tuple(range(10))
    assert [len(owned) for owned in stage.owned_layers] == [10] * 6 + [9] * 2
    assert stage.ratio == pytest.approx(6.3374, abs=5e-5)
    reserved = stage_capacity(0, glm_5_2(), (), ranks=8, memory=21_768_000_000, reserve=300 * MIB)
    assert reserved.ratio == pytest.approx(6.25, rel=0.005)
    assert reserved.blocks_off == pytest.approx(1_836, abs=1)
    assert reserved.blocks_on == pytest.approx(11_468, rel=0.001)


def test_by_bytes_glm_5_2_gains_nearly_one_percent() -> None:
    """Rank 0 keeps 9 layers, because layers 0, 1, 2 and 6 all have indexers."""
    stage = stage_capacity(
        0, glm_5_2(), (), ranks=8, memory=21_768_000_000, policy=OwnershipPolicy.BYTES
    )
    assert stage.ratio == pytest.approx(6.395, abs=5e-4)
    assert len(stage.owned_layers[0]) == 9


def test_fitted_scratch_gains_as_much_and_no_layer_moves() -> None:
    """Rank 0 keeps layer 1, the only odd one with an indexer: its slot 1 needs the main cache only.

    With both, rank 0 binds no longer, and little more is gained.
    """
    stages = {
        (policy, scratch): stage_capacity(
            0, glm_5_2(), (), ranks=8, memory=21_768_000_000, policy=policy, scratch=scratch
        )
        for policy in OwnershipPolicy
        for scratch in ScratchPolicy
    }
    by_count, fitted = OwnershipPolicy.COUNT, ScratchPolicy.FITTED
    assert stages[by_count, ScratchPolicy.LARGEST].ratio == pytest.approx(6.3374, abs=5e-5)
    assert stages[by_count, fitted].ratio == pytest.approx(6.395, abs=5e-4)
    assert [len(owned) for owned in stages[by_count, fitted].owned_layers] == [10] * 6 + [9] * 2
    assert stages[OwnershipPolicy.BYTES, fitted].ratio >= stages[by_count, fitted].ratio


def _pp2(reserve: int) -> DeploymentCapacity:
    memory = 26_330_000_000
    return deployment(
        [
            stage_capacity(0, glm_5_2(0, 38), (), ranks=8, memory=memory, reserve=reserve),
            stage_capacity(1, glm_5_2(38, 78), (), ranks=8, memory=memory, reserve=reserve),
        ],
        block_size=128,
    )


def test_glm_5_2_pp2_is_as_published_and_the_binding_stage_switches() -> None:
    plain = _pp2(0)
    assert [stage.bytes_per_block_off for stage in plain.stages] == [5_789_184, 6_067_200]
    assert [max(stage.bytes_per_block_on) for stage in plain.stages] == [1_116_672, 1_099_776]
    assert [round(stage.ratio, 3) for stage in plain.stages] == [5.184, 5.517]
    assert (plain.binding_stage_off, plain.binding_stage_on) == (1, 0)
    reserved = _pp2(300 * MIB)
    assert reserved.ratio == pytest.approx(5.35, rel=0.005)
    assert reserved.blocks_off == pytest.approx(4_339, abs=1)
    assert reserved.blocks_on == pytest.approx(23_222, rel=0.005)
    assert reserved.tokens_on == reserved.blocks_on * 128
    assert reserved.tokens_off == reserved.blocks_off * 128


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(10**4, 10**6)),
        min_size=1,
        max_size=4,
    )
)
def test_a_deployment_takes_the_smallest_stage(shapes: list[tuple[int, int, int]]) -> None:
    stages: list[StageCapacity] = [
        stage_capacity(i, sized([100] * layers), (), ranks=ranks, memory=memory)
        for i, (layers, ranks, memory) in enumerate(shapes)
    ]
    whole = deployment(stages, block_size=16)
    assert whole.blocks_on == min(stage.blocks_on for stage in stages)
    assert whole.blocks_off == min(stage.blocks_off for stage in stages)
    assert stages[whole.binding_stage_on].blocks_on == whole.blocks_on
    assert stages[whole.binding_stage_off].blocks_off == whole.blocks_off


def test_alignment_padding_is_part_of_the_budget() -> None:
    """10 bytes in lines of 64: three regions of a rank take 64 + 64 + 10 bytes for one block."""
    targets = sized([10, 10])
    fits = stage_capacity(0, targets, (), ranks=2, memory=138, alignment=64)
    short = stage_capacity(0, targets, (), ranks=2, memory=137, alignment=64)
    assert (fits.blocks_on, short.blocks_on) == (1, 0)


def test_the_explanation_names_what_binds_and_says_when_nothing_is_saved() -> None:
    said = _pp2(300 * MIB).explain()
    for part in ("bound by stage 1", "bound by rank 0 of stage 0", "1,116,672", "5,789,184"):
        assert part in said
    assert "saves nothing" not in said
    few = deployment([stage_capacity(0, sized([10] * 4), (), ranks=2, memory=10**6)], 16)
    assert few.ratio == 1.0
    assert "saves nothing" in few.explain()


def test_deployments_that_cannot_be_are_refused_by_value() -> None:
    with pytest.raises(PlanError, match="reserve of 1,000 bytes does not fit into 1,000 bytes"):
        stage_capacity(0, sized([10]), (), ranks=2, memory=1_000, reserve=1_000)
    with pytest.raises(PlanError, match="reserve of -1 bytes"):
        stage_capacity(0, sized([10]), (), ranks=2, memory=1_000, reserve=-1)
    with pytest.raises(PlanError, match="reserve of 0 bytes does not fit into 0 bytes"):
        stage_capacity(0, sized([10]), (), ranks=2, memory=0)
    with pytest.raises(PlanError, match="stage 4 has no target layers"):
        stage_capacity(4, (), (), ranks=2, memory=1_000)
    with pytest.raises(PlanError, match="group of 0 ranks"):
        stage_capacity(0, sized([10]), (), ranks=0, memory=1_000)
    with pytest.raises(PlanError, match="at least one stage"):
        deployment([], 16)
    stage = stage_capacity(0, sized([10]), (), ranks=1, memory=1_000)
    with pytest.raises(PlanError, match="block size of 0 tokens"):
        deployment([stage], 0)


def _drafts(count: int, size: int) -> tuple[LayerBundle, ...]:
    return tuple(LayerBundle(90 + i, (Component(f"mtp.{i}", size),)) for i in range(count))
