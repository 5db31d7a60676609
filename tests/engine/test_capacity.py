"""Capacity on and off equals the formula to the block; what is allocated equals the budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.harness import kvpp_off, kvpp_on, start_engine

pytestmark = pytest.mark.engine

MEMORY = 40_000_003  # bytes per rank; deliberately no multiple of anything
PAGE = 16 * (512 + 64) * 4  # bytes of one block of 16 tokens of one layer, float32


@pytest.mark.parametrize("layers", [6, 7, 12])
def test_capacity_is_the_formula(checkpoint: Callable[[int], Path], layers: int) -> None:
    """Section 2.2: floor(memory / (largest share + 2 slots)) blocks, and that many bytes."""
    shares = [layers - layers // 2, layers // 2]
    model = checkpoint(layers)
    with start_engine(model, kvpp_off(), memory=MEMORY) as engine:
        assert engine.num_blocks == MEMORY // (layers * PAGE)
    with start_engine(model, kvpp_on(), memory=MEMORY) as engine:
        blocks = engine.num_blocks
        assert blocks == MEMORY // ((shares[0] + 2) * PAGE)
        for share, layout, allocation in zip(
            shares, engine.call("kvpp_layout"), engine.call("observe_allocation"), strict=True
        ):
            assert len(layout["owned_layers"]) == share
            assert layout["allocated_bytes"] == blocks * (share + 2) * PAGE <= MEMORY
            assert allocation == {"buffers": 1, "bytes": layout["allocated_bytes"]}
