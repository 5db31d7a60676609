"""Masters and stores for the tests of this folder. A store of each kind serves the whole folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pool.master import Master
from tests.pool.stores import MemCacheStandInStore, MooncakeStore, Store

KINDS = ("mooncake-packed", "mooncake-pieces", "memcache-stand-in")


@pytest.fixture(scope="package")
def shared_master() -> Iterator[Master]:
    """For tests that leave it alone."""
    master = Master()
    yield master
    master.stop()


@pytest.fixture
def master() -> Iterator[Master]:
    """For one test, which may kill it."""
    master = Master(["--default_kv_lease_ttl=200"])
    yield master
    master.stop()


def opened_store(kind: str, master: Callable[[], Master], folder: Path) -> Store:
    """A store of a kind, to be closed; only some need a master."""
    if kind == "memcache-stand-in":
        return MemCacheStandInStore(folder)
    return MooncakeStore(master(), packed=kind == "mooncake-packed")


@pytest.fixture(scope="package", params=KINDS)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    """Every backend that can run here."""
    folder = tmp_path_factory.mktemp("store")
    opened = opened_store(request.param, lambda: request.getfixturevalue("shared_master"), folder)
    yield opened
    opened.close()


_NUMBERS = itertools.count()


@pytest.fixture
def prefix() -> str:
    """Keys of one test start with this."""
    return f"kvpp1@test{next(_NUMBERS)}@"
