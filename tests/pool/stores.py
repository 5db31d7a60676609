"""Stores that the conformance suite runs over, with hands to reach into them from behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from kvpp_connectors.pool.store.base import Store
from kvpp_connectors.pool.store.memcache import MemCacheStore, MemoryKind
from kvpp_connectors.pool.store.mooncake import MooncakeStore
from kvpp_connectors.pool.store.mooncake_settings import MooncakeSettings
from tests.pool.master import Master
from tests.pool.memcache_stand_in import InMemoryMemCacheStandIn, StandInPool

__all__ = ["SEGMENT", "MemCacheStandInStore", "MooncakeUnderTest", "StoreUnderTest", "raw_mooncake"]

SEGMENT = 16 << 20  # bytes: the least that Mooncake takes


class StoreUnderTest(Protocol):
    """One store and the backends that are connected to it."""

    backend: Store
    packed: bool  # whether the suite gives it one piece an object

    def second(self) -> Store:
        """Another client."""

    def remove(self, key: str) -> None:
        """As eviction does."""

    def replace(self, key: str, data: bytes) -> None:
        """Put other bytes under a key."""

    def read(self, key: str) -> bytes:
        """The bytes under a key, without our code."""

    def close(self) -> None:
        """Close every client."""


def raw_mooncake(address: str, segment: int = 0) -> Any:
    """A client of the binding itself."""
    from mooncake.store import MooncakeDistributedStore

    raw = MooncakeDistributedStore()
    code = raw.setup("127.0.0.1", "P2PHANDSHAKE", segment, 4 << 20, "tcp", "", address)
    assert code == 0
    return raw


class MooncakeUnderTest:
    """Mooncake for real: ``packed`` as on tcp, or with the pieces of rdma and ascend over tcp."""

    def __init__(self, master: Master, packed: bool, **settings: Any) -> None:
        self._settings = MooncakeSettings(master_server_address=master.address, **settings)
        self.packed = packed
        self._clients: list[MooncakeStore] = []
        self.backend: Store = self._client(SEGMENT)
        self.raw = raw_mooncake(master.address)

    def second(self) -> Store:
        return self._client(0)

    def remove(self, key: str) -> None:
        assert self.raw.remove(key, True) == 0

    def replace(self, key: str, data: bytes) -> None:
        self.remove(key)
        assert self.raw.put(key, data) == 0

    def read(self, key: str) -> bytes:
        data: bytes = self.raw.get(key)
        return data

    def close(self) -> None:
        self.raw.close()
        for client in self._clients:
            client.close()

    def _client(self, segment: int) -> MooncakeStore:
        kind = MooncakeStore if self.packed else _InPieces
        client = kind(self._settings, "127.0.0.1", "tcp", segment)
        self._clients.append(client)
        client.connect()
        return client


class _InPieces(MooncakeStore):
    """Over tcp, yet with the pieces that another transport would get."""

    packed = False


class MemCacheStandInStore:
    """MemCache's backend over the stand-in."""

    packed = False

    def __init__(self, folder: Path) -> None:
        self.pool = StandInPool(SEGMENT)
        config = folder / "mmc-local.conf"
        config.write_text("ock.mmc.meta_service_url = tcp://127.0.0.1:5000\n")
        self._environment = {"MMC_LOCAL_CONFIG_PATH": str(config)}
        self._clients: list[MemCacheStore] = []
        self.backend = self.second()

    def second(self) -> Store:
        client = MemCacheStore(
            MemoryKind.HOST,
            device_id=0,
            moves_data=True,
            environment=self._environment,
            client=lambda: InMemoryMemCacheStandIn(self.pool),
        )
        client.connect()
        self._clients.append(client)
        return client

    def remove(self, key: str) -> None:
        del self.pool.objects[key]

    def replace(self, key: str, data: bytes) -> None:
        self.pool.objects[key] = data

    def read(self, key: str) -> bytes:
        return self.pool.objects[key]

    def close(self) -> None:
        for client in self._clients:
            client.close()
