"""Hypothesis strategies for models and placements."""

from __future__ import annotations

from hypothesis import strategies as st

from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.layout import Placement, ScratchPolicy
from kvpp_core.ownership import OwnershipPolicy, assign_owners

__all__ = ["bundles", "placements", "sized"]


def sized(sizes: list[int]) -> tuple[LayerBundle, ...]:
    """A bundle of one component for each size in bytes per block."""
    return tuple(LayerBundle(i, (Component(f"{i}.kv", size),)) for i, size in enumerate(sizes))


@st.composite
def bundles(
    draw: st.DrawFn, min_layers: int = 0, max_layers: int = 12, prefix: str = "layers"
) -> tuple[LayerBundle, ...]:
    """Bundles of 1 to 4 components of 1 to 3,000 bytes per block; layer indices have gaps."""
    indices = draw(st.sets(st.integers(0, 90), min_size=min_layers, max_size=max_layers))
    parts = st.lists(st.integers(1, 3000), min_size=1, max_size=4)
    return tuple(
        LayerBundle(
            layer,
            tuple(Component(f"{prefix}.{layer}.{i}", size) for i, size in enumerate(draw(parts))),
        )
        for layer in sorted(indices)
    )


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any rank of any group over any bundles and drafts, by both policies."""
    targets = draw(bundles())
    ranks = draw(st.integers(1, 6))
    return Placement(
        targets,
        assign_owners(targets, ranks, draw(st.sampled_from(OwnershipPolicy))),
        ranks,
        draw(st.integers(0, ranks - 1)),
        draw(bundles(max_layers=3, prefix="drafts")),
        draw(st.sampled_from([1, 1, 2, 7, 64, 512, 4096])),
        draw(st.sampled_from(ScratchPolicy)),
    )
