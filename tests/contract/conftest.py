"""Models for the contract tests, each a folder with a config.json."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.launches import write_llama, write_memcache, write_mla, write_mtp


@pytest.fixture(autouse=True)
def memcache_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """MemCache's own settings are there, as on a node that has it."""
    with pytest.MonkeyPatch.context() as patch:
        file = write_memcache(tmp_path_factory.getbasetemp())
        patch.setenv("MMC_LOCAL_CONFIG_PATH", str(file))
        yield


@pytest.fixture(scope="session")
def mla_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V2 model of 12 layers."""
    return write_mla(tmp_path_factory.mktemp("mla"))


@pytest.fixture(scope="session")
def mtp_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 model of 12 layers and an MTP layer."""
    return write_mtp(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="session")
def llama_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without MLA."""
    return write_llama(tmp_path_factory.mktemp("llama"))
