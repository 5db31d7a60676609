"""Masters and stores for the tests of this folder. A store of each kind serves the whole folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool.fixtures import prefix, shared_master, store
from tests.pool.master import Master
from tests.pool.store_process import StoreProcess, lent_pool

__all__ = ["master", "pool", "prefix", "shared_master", "store"]


@pytest.fixture
def master() -> Iterator[Master]:
    """For one test, which may kill it."""
    master = Master(["--default_kv_lease_ttl=200"])
    yield master
    master.stop()


@pytest.fixture(scope="module")
def pool() -> Iterator[StoreProcess]:
    """A master and a store that hold what a module's engines save."""
    with lent_pool() as store:
        yield store
