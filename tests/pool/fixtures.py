"""Stores of every kind, for the folders whose conftest imports these fixtures.

A store serves a whole folder. What needs more than torch is imported where it is used: some of
these folders' tests also run where vLLM and Mooncake are not (tests/ascend_sim).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pool.master import Master
    from tests.pool.stores import StoreUnderTest

__all__ = ["KINDS", "prefix", "shared_master", "store"]

KINDS = ("mooncake-packed", "mooncake-pieces", "memcache-stand-in")


@pytest.fixture(scope="package")
def shared_master() -> Iterator[Master]:
    """For tests that leave it alone."""
    from tests.pool.master import Master

    master = Master()
    yield master
    master.stop()


@pytest.fixture(
    scope="package",
    params=[
        kind if kind == "memcache-stand-in" else pytest.param(kind, marks=pytest.mark.process)
        for kind in KINDS
    ],
)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoreUnderTest]:
    """Every backend that can run here; only some need a master."""
    from tests.pool.stores import MemCacheStandInStore, MooncakeUnderTest

    opened: StoreUnderTest
    if request.param == "memcache-stand-in":
        opened = MemCacheStandInStore(tmp_path_factory.mktemp("store"))
    else:
        master = request.getfixturevalue("shared_master")
        opened = MooncakeUnderTest(master, packed=request.param == "mooncake-packed")
    yield opened
    opened.close()


_NUMBERS = itertools.count()


@pytest.fixture
def prefix() -> str:
    """Keys of one test start with this."""
    return f"kvpp1@test{next(_NUMBERS)}@"
