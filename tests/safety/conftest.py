"""What the modules of the safety properties share: gloo worlds, transfer engines, stores.

Imports that need more than torch are made where they are used: S4, S5, S7 and S10 also run beside
torch-npu, where vLLM and Mooncake are not (tests/ascend_sim).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.core.gloo_world import GlooWorld

if TYPE_CHECKING:
    from tests.p2p.conftest import Machine
    from tests.pool.master import Master
    from tests.pool.stores import Store


@pytest.fixture(scope="package")
def world2() -> Iterator[GlooWorld]:
    """Two ranks."""
    world = GlooWorld(2)
    yield world
    world.close()


@pytest.fixture(scope="package")
def machine() -> Machine:
    """Prefill and decode workers' memory, behind real transfer engines."""
    from tests.p2p.conftest import new_machine

    return new_machine()


@pytest.fixture(scope="package")
def shared_master() -> Iterator[Master]:
    """A mooncake_master."""
    from tests.pool.master import Master

    master = Master()
    yield master
    master.stop()


@pytest.fixture(scope="package", params=["mooncake-packed", "mooncake-pieces", "memcache-stand-in"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    """Every backend that can run here."""
    from tests.pool.conftest import opened_store

    folder = tmp_path_factory.mktemp("store")
    opened = opened_store(request.param, lambda: request.getfixturevalue("shared_master"), folder)
    yield opened
    opened.close()


_NUMBERS = itertools.count()


@pytest.fixture
def prefix() -> str:
    """Keys of one test start with this."""
    return f"kvpp1@safety{next(_NUMBERS)}@"
