"""What the modules of the safety properties share: gloo worlds, transfer engines, stores, a model.

Imports that need more than torch are made where they are used: S4, S5, S7 and S10 also run beside
torch-npu, where vLLM and Mooncake are not (tests/ascend_sim).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.core.conftest import world2
from tests.pool.fixtures import prefix, shared_master, store

if TYPE_CHECKING:
    from tests.p2p.conftest import Machine

__all__ = ["machine", "mla_model", "prefix", "shared_master", "store", "world2"]


@pytest.fixture(scope="package")
def machine() -> Machine:
    """Prefill and decode workers' memory, behind real transfer engines."""
    from tests.p2p.conftest import new_machine

    return new_machine()


@pytest.fixture(scope="package")
def mla_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json, for engines without a model."""
    from tests.contract.launches import write_mla

    return write_mla(tmp_path_factory.mktemp("safety") / "model")
