"""Blocks that fit: per rank for the engine, per stage and deployment for `kvpp plan`.

Section 2.2 of the specification: available blocks = floor(available memory / physical bytes per
block). Alignment padding is counted by the same builder that lays out the allocation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kvpp_core.bundles import LayerBundle
from kvpp_core.errors import PlanError
from kvpp_core.layout import SCRATCH_SLOTS, Placement, ScratchPolicy, build_layout
from kvpp_core.ownership import OwnershipPolicy, assign_owners

__all__ = ["DeploymentCapacity", "StageCapacity", "blocks_that_fit", "deployment", "stage_capacity"]


def blocks_that_fit(placement: Placement, available_bytes: int) -> int:
    """The largest block count whose layout takes at most ``available_bytes`` on this rank.

    Raises:
        PlanError: the rank has no cache to size.
    """
    per_block = placement.physical_bytes_per_block
    if per_block == 0:
        raise PlanError("this rank has neither target nor draft layers: nothing to size")
    upper = max(available_bytes, 0) // per_block
    if placement.alignment == 1:
        return upper
    counts = range(upper + 1)
    return bisect_right(counts, available_bytes, key=lambda n: build_layout(placement, n).size) - 1


@dataclass(frozen=True, slots=True)
class StageCapacity:
    """Capacity of one PP stage, per rank of its KVPP group. All sizes are bytes per rank."""

    stage: int
    layers: tuple[int, ...]  # transformer layers of the stage
    owned_layers: tuple[tuple[int, ...], ...]  # by group rank
    draft_layers: int  # kept whole by every rank of the stage
    bytes_per_block_off: int  # a rank without KVPP: everything
    bytes_per_block_on: tuple[int, ...]  # by group rank: section 2.2
    scratch_bytes: tuple[int, ...]  # of them, both scratch slots
    memory: int  # KV memory of each rank
    reserve: int  # bytes of it that KVPP takes for itself (communicator, staging)
    blocks_off: int
    blocks_on: int

    @property
    def binding_rank(self) -> int:
        """The group rank that has the least room: the largest bytes per block."""
        return self.bytes_per_block_on.index(max(self.bytes_per_block_on))

    @property
    def ratio(self) -> float:
        """Capacity on / off of this stage alone, not rounded to whole blocks."""
        on = (self.memory - self.reserve) / max(self.bytes_per_block_on)
        return on / (self.memory / self.bytes_per_block_off)


@dataclass(frozen=True, slots=True)
class DeploymentCapacity:
    """Capacity of all stages: the engine takes the smallest block count."""

    stages: tuple[StageCapacity, ...]
    block_size: int  # tokens

    @property
    def blocks_off(self) -> int:
        """Blocks without KVPP."""
        return min(stage.blocks_off for stage in self.stages)

    @property
    def blocks_on(self) -> int:
        """Blocks with KVPP."""
        return min(stage.blocks_on for stage in self.stages)

    @property
    def binding_stage_off(self) -> int:
        """The stage that limits the block count without KVPP."""
        return max(self.stages, key=lambda s: s.bytes_per_block_off / s.memory).stage

    @property
    def binding_stage_on(self) -> int:
        """The stage that limits the block count with KVPP."""
        return min(self.stages, key=_blocks_unrounded).stage

    @property
    def tokens_off(self) -> int:
        """Tokens without KVPP."""
        return self.blocks_off * self.block_size

    @property
    def tokens_on(self) -> int:
        """Tokens with KVPP."""
        return self.blocks_on * self.block_size

    @property
    def ratio(self) -> float:
        """Capacity on / off, each bound by its own stage, not rounded to whole blocks."""
        off = min(stage.memory / stage.bytes_per_block_off for stage in self.stages)
        return min(map(_blocks_unrounded, self.stages)) / off

    def explain(self) -> str:
        """The figures as text: what limits them, and their arithmetic."""
        stage = self.stages[self.binding_stage_on]
        rank = stage.binding_rank
        owned = len(stage.owned_layers[rank])
        drafts = f", {stage.draft_layers} draft layers" if stage.draft_layers else ""
        reserve = f" after a reserve of {stage.reserve:,} bytes" if stage.reserve else ""
        lines = [
            f"KVPP off: {self.tokens_off:,} tokens ({self.blocks_off:,} blocks), bound by stage "
            f"{self.binding_stage_off}.",
            f"KVPP on: {self.tokens_on:,} tokens ({self.blocks_on:,} blocks), bound by rank {rank} "
            f"of stage {stage.stage}{reserve}: {owned} of {len(stage.layers)} target layers"
            f"{drafts} and {SCRATCH_SLOTS} scratch slots take "
            f"{stage.bytes_per_block_on[rank]:,} bytes per block, against "
            f"{stage.bytes_per_block_off:,} for everything.",
        ]
        if self.ratio <= 1:
            lines.append(
                "KVPP saves nothing here: with so few layers per rank the two scratch slots cost "
                "more than the layers that other ranks keep. Use more layers per stage or leave "
                "KVPP off."
            )
        return "\n".join(lines)


def _blocks_unrounded(stage: StageCapacity) -> float:
    return (stage.memory - stage.reserve) / max(stage.bytes_per_block_on)


def stage_capacity(
    stage: int,
    bundles: Sequence[LayerBundle],
    drafts: Sequence[LayerBundle],
    *,
    ranks: int,
    memory: int,
    reserve: int = 0,
    policy: OwnershipPolicy = OwnershipPolicy.COUNT,
    alignment: int = 1,
    scratch: ScratchPolicy = ScratchPolicy.LARGEST,
) -> StageCapacity:
    """Capacity of one PP stage whose ``ranks`` ranks have ``memory`` bytes of KV memory each.

    Raises:
        PlanError: the stage has no layers, or the reserve is not smaller than the memory.
    """
    if not 0 <= reserve < memory:
        raise PlanError(
            f"a reserve of {reserve:,} bytes does not fit into {memory:,} bytes of KV memory"
        )
    if not bundles:
        raise PlanError(f"stage {stage} has no target layers; a stage needs at least one")
    owners = assign_owners(bundles, ranks, policy)
    placements = [
        Placement(tuple(bundles), owners, ranks, rank, tuple(drafts), alignment, scratch)
        for rank in range(ranks)
    ]
    logical = placements[0].logical_bytes_per_block
    return StageCapacity(
        stage=stage,
        layers=tuple(bundle.layer for bundle in bundles),
        owned_layers=tuple(tuple(bundles[i].layer for i in p.owned) for p in placements),
        draft_layers=len(drafts),
        bytes_per_block_off=logical,
        bytes_per_block_on=tuple(p.physical_bytes_per_block for p in placements),
        scratch_bytes=tuple(sum(p.slot_bytes_per_block) for p in placements),
        memory=memory,
        reserve=reserve,
        blocks_off=memory // logical,
        blocks_on=min(blocks_that_fit(p, memory - reserve) for p in placements),
    )


def deployment(stages: Sequence[StageCapacity], block_size: int) -> DeploymentCapacity:
    """The capacity of one replica's stages together.

    Raises:
        PlanError: there is no stage, or ``block_size`` (tokens) is not positive.
    """
    if not stages:
        raise PlanError("a deployment needs at least one stage")
    if block_size <= 0:
        raise PlanError(f"block size of {block_size} tokens; expected a positive number")
    return DeploymentCapacity(tuple(stages), block_size)
