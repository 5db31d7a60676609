"""The first requests of an engine find what the pool has: its scheduler waits for the store."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvpp_connectors.pool import connector as pool_connector
from kvpp_connectors.pool.connector import AscendStoreConnector
from kvpp_connectors.pool.messages import PoolWorkerFacts
from kvpp_connectors.pool.store import resilient as guard
from tests.contract.launches import write_mla
from tests.pool.scripted import ScriptedStore
from tests.safety.site import Kind, Launch

FACTS: dict[tuple[int, ...], PoolWorkerFacts] = {(0, 0): PoolWorkerFacts(("layer",), None)}
BOUND_S = 30.0


class SlowStore(ScriptedStore):
    """Its set-up takes until ``answers``."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def connect(self) -> None:
        assert self.answers.wait(BOUND_S)
        super().connect()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    """What the connector of the test gets."""
    backend = SlowStore()
    monkeypatch.setattr(pool_connector, "create_store", lambda *_, **__: backend)
    return backend


@pytest.fixture
def connector(tmp_path: Path, backend: SlowStore) -> AscendStoreConnector:
    """A scheduler half."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

    launch = Launch(write_mla(tmp_path / "model"), Kind(pool=True))
    caches = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[])
    return AscendStoreConnector(launch.config, KVConnectorRole.SCHEDULER, caches)


def test_a_slow_store_is_there_for_the_first_request(
    backend: SlowStore, connector: AscendStoreConnector
) -> None:
    started = threading.Thread(target=connector.set_xfer_handshake_metadata_pp_aware, args=[FACTS])
    started.start()
    started.join(0.2)
    assert started.is_alive(), "it did not wait"
    backend.answers.set()
    started.join(BOUND_S)
    assert not started.is_alive()
    assert backend.connected.is_set() and connector._store.exist(["a"]) == [False]
    connector.shutdown()


def test_an_engine_serves_without_a_store_that_does_not_come(
    backend: SlowStore,
    connector: AscendStoreConnector,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(guard, "_START_S", 0.05)
    connector.set_xfer_handshake_metadata_pp_aware(FACTS)
    assert "no pool after 0.05 s" in caplog.text
    backend.answers.set()
    connector.shutdown()
