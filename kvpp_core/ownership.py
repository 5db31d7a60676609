"""Which rank owns which bundle.

Section 2.1 of the specification: contiguous, balanced partitions of the target layers of one PP
stage; lower ranks take the remainder. Balancing by bytes is our option for models whose bundles
differ in size (GLM-5.2: 21 of 78 layers have an indexer).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate

from kvpp_core.bundles import LayerBundle
from kvpp_core.errors import PlanError

__all__ = ["OwnershipPolicy", "assign_owners"]


class OwnershipPolicy(StrEnum):
    """How the target layers of a stage are split over the ranks of its group."""

    COUNT = "count"  # the specification: layer counts differ by one at most
    BYTES = "bytes"  # the largest rank keeps as few bytes per block as possible


def assign_owners(
    bundles: Sequence[LayerBundle], ranks: int, policy: OwnershipPolicy = OwnershipPolicy.COUNT
) -> tuple[int, ...]:
    """Return the owner's group rank of every bundle, in the order of ``bundles``.

    Each rank's share is contiguous; a rank may own nothing. The result depends on the arguments
    alone, so every rank computes the same.

    Raises:
        PlanError: ``ranks`` is not positive.
    """
    if ranks <= 0:
        raise PlanError(f"a KVPP group of {ranks} ranks cannot own layers")
    if policy is OwnershipPolicy.BYTES:
        counts = _counts_by_bytes([bundle.bytes_per_block for bundle in bundles], ranks)
    else:
        share, remainder = divmod(len(bundles), ranks)
        counts = [share + (rank < remainder) for rank in range(ranks)]
    return tuple(rank for rank, count in enumerate(counts) for _ in range(count))


def _counts_by_bytes(sizes: Sequence[int], ranks: int) -> list[int]:
    """Split ``sizes`` into ``ranks`` contiguous parts whose largest sum is the least possible.

    Of all such splits take the one with the smallest sum of squares, so that the other ranks
    come out even too.
    """
    sums = [0, *accumulate(sizes)]
    limit = _least_largest_sum(sizes, ranks)
    # best[end] = (sum of squares, cut points) of the first `end` sizes over the ranks so far
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(ranks):
        step: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (cost, cuts) in best.items():
            for end in range(start, len(sizes) + 1):
                part = sums[end] - sums[start]
                if part > limit:
                    break
                candidate = (cost + part * part, (*cuts, end))
                # A tie goes to the split with the later cuts: lower ranks take the remainder.
                if end not in step or (candidate[0], [-cut for cut in candidate[1]]) < (
                    step[end][0],
                    [-cut for cut in step[end][1]],
                ):
                    step[end] = candidate
        best = step
    cuts = best[len(sizes)][1]
    return [end - start for start, end in zip((0, *cuts), cuts, strict=False)]


def _least_largest_sum(sizes: Sequence[int], ranks: int) -> int:
    """The smallest limit under which a greedy split needs at most ``ranks`` parts."""
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        limit = (low + high) // 2
        parts, current = 1, 0
        for size in sizes:
            if current + size > limit:
                parts, current = parts + 1, 0
            current += size
        low, high = (low, limit) if parts <= ranks else (limit + 1, high)
    return low
