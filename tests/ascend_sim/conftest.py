"""Collected only where torch has an NPU: in the environment of `make test-ascend-sim`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.gloo_world import GlooWorld
from tests.core.simulated_npu import npu_is_there

collect_ignore_glob = [] if npu_is_there() else ["test_*.py"]


@pytest.fixture(scope="package")
def world2() -> Iterator[GlooWorld]:
    """Two ranks, each on an NPU of its own."""
    world = GlooWorld(2)
    yield world
    world.close()
