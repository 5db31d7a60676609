"""Gloo worlds that all tests of kvpp_core share: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.gloo_world import GlooWorld


@pytest.fixture(scope="package")
def world2() -> Iterator[GlooWorld]:
    """Two ranks."""
    world = GlooWorld(2)
    yield world
    world.close()


@pytest.fixture(scope="package")
def world4() -> Iterator[GlooWorld]:
    """Four ranks."""
    world = GlooWorld(4)
    yield world
    world.close()
