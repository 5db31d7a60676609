"""MemCache (memcache_hybrid) as a pool: whole objects, copied by the kind of their memory.

Its settings are a file of its own, named by MMC_LOCAL_CONFIG_PATH. A scheduler's client only asks
and holds no memory; a worker's client needs an NPU, its driver and CANN (docs/pool.md).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from kvpp_connectors.connector.options import OptionsError
from kvpp_connectors.pool.store.base import (
    Buffer,
    PoolUnavailable,
    StoreOutcome,
    StoreResult,
    all_ended,
)
from kvpp_connectors.pool.store.client import PROBE, CodeBook, NoAnswer, StoreClient, ask
from kvpp_connectors.pool.store.memcache_settings import memcache_config_file
from kvpp_core.errors import KvppError

__all__ = ["MemCacheStore", "MemoryKind", "new_client"]

_NO_SPACE_WAITS_S = (0.005, 0.010, 0.020, 0.040)  # it evicts in the background
_FULL_OR_ANY_ERROR = -1
_BOOK = CodeBook(
    "MemCache",
    {
        -1: (StoreResult.FAILED, "an error that MemCache does not name; its own log does"),
        -2: (StoreResult.FAILED, "the copy direction does not fit the memory's kind"),
        -8: (StoreResult.FAILED, "a library of the device is not loaded"),
        -3000: (StoreResult.FAILED, "MemCache calls a parameter invalid"),
        -3001: (StoreResult.NO_SPACE, "no memory could be allocated"),
        -3002: (StoreResult.FAILED, "an object could not be made"),
        -3003: (StoreResult.UNAVAILABLE, "MemCache's service is not started"),
        -3004: (StoreResult.UNAVAILABLE, "MemCache's MetaService did not answer in time"),
        -3006: (StoreResult.ALREADY_THERE, "saved already, or being saved"),
        -3007: (StoreResult.MISSING, "not in the pool: never saved, evicted, or its owner is gone"),
        -3008: (StoreResult.UNAVAILABLE, "MemCache's client is not initialised"),
        -3012: (StoreResult.WRONG_LENGTH, "the object has another size"),
        -3013: (StoreResult.NO_SPACE, "the pool has no room"),
        -3014: (StoreResult.UNAVAILABLE, "the link to MemCache's MetaService is broken"),
        -3016: (StoreResult.NO_SPACE, "the pool has no memory"),
        -3017: (StoreResult.UNAVAILABLE, "there is no MetaService"),
        -3018: (StoreResult.UNAVAILABLE, "there is no LocalService"),
        -3019: (StoreResult.UNAVAILABLE, "MemCache's client is not initialised"),
        -3101: (StoreResult.MISSING, "its writer has not finished it"),
        -3102: (StoreResult.MISSING, "not in the pool: never saved, or evicted"),
        -3104: (StoreResult.FAILED, "it has a lease"),
        -3106: (StoreResult.LEASE_EXPIRED, "there is no lease on it"),
    },
)


class MemoryKind(Enum):
    """Where buffers lie, and by which of MemCache's copy directions they are saved and loaded."""

    HOST = (3, 2)  # H2G, G2H
    DEVICE = (0, 1)  # L2G, G2L

    @property
    def save(self) -> int:
        """The direction into the pool."""
        return self.value[0]

    @property
    def load(self) -> int:
        """The direction out of the pool."""
        return self.value[1]


class MemCacheStore(StoreClient):
    """One client of a MemCache pool. One that is not closed can crash the process at its end."""

    name = "memcache"
    _book = _BOOK
    _close_wait_s = 30.0
    packed = False  # its calls take the pieces of many objects at once

    def __init__(
        self,
        kind: MemoryKind,
        device_id: int,
        moves_data: bool,
        environment: Mapping[str, str] | None = None,
        client: Callable[[], Any] | None = None,
    ) -> None:
        """Do not connect yet.

        Args:
            kind: of the memory that put() and get() are given.
            device_id: of this process's NPU.
            moves_data: False for a scheduler, which only asks.
            environment: for MMC_LOCAL_CONFIG_PATH; the process's own if left out.
            client: makes a DistributedObjectStore; memcache_hybrid's if left out.
        """
        super().__init__()
        self._kind = kind
        self._device_id = device_id
        self._moves_data = moves_data
        self._environment = os.environ if environment is None else environment
        self._new_client = client or new_client

    def put(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        self._check_role("save")
        try:
            there = self.exist(keys)
        except PoolUnavailable as error:
            return all_ended(keys, StoreOutcome(StoreResult.UNAVAILABLE, words=str(error)))
        outcomes = [StoreOutcome(StoreResult.ALREADY_THERE)] * len(keys)
        missing = [i for i, found in enumerate(there) if not found]
        self._put_missing(
            keys,
            buffers,
            outcomes,
            missing,
            _NO_SPACE_WAITS_S,
            lambda outcome: outcome.result is StoreResult.NO_SPACE,
        )
        return outcomes

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        self._check_role("load")
        starts, sizes = [list(b.addresses) for b in buffers], [list(b.sizes) for b in buffers]
        codes = self._call(
            keys,
            "batch_get_into_layers",
            lambda client: client.batch_get_into_layers(list(keys), starts, sizes, self._kind.load),
        )
        if isinstance(codes, StoreOutcome):
            return all_ended(keys, codes)
        return [
            StoreOutcome(StoreResult.LOADED) if code == 0 else _BOOK.of_load(code) for code in codes
        ]

    @property
    def _registers(self) -> bool:
        """Not for a scheduler's client, which it would crash."""
        return self._moves_data

    def _refusal(self, outcome: StoreOutcome, keys: int) -> str:
        return f"MemCache: {outcome} ({keys} keys)"

    def _set_up(self) -> Any:
        try:
            path = memcache_config_file(self._environment)
        except OptionsError as error:
            raise PoolUnavailable(str(error)) from error
        client = self._new_client()
        code = client.init(self._device_id, init_bm=self._moves_data)
        if code != 0:
            needs = (
                " A client that moves data needs an NPU with its driver, CANN (ASCEND_HOME_PATH) "
                "and a protocol that fits them."
                if self._moves_data
                else ""
            )
            raise PoolUnavailable(
                f"MemCache's client did not start on device {self._device_id} with {path} "
                f"(code {code}): is its MetaService running at ock.mmc.meta_service_url?{needs}"
            )
        self._check_link(client)
        return client

    def _check_link(self, client: Any) -> None:
        """Close a client that says it has started and reaches nobody.

        After an init() that failed MemCache 1.3.0 answers the next one with 0, yet never links it
        to the MetaService. Only close() ends that: the client after it is sound.
        """
        try:
            (code,) = ask(lambda: client.batch_is_exist([PROBE]), [PROBE], "batch_is_exist")
        except NoAnswer as error:
            client.close()
            raise PoolUnavailable(f"MemCache: {error}") from error
        if code < 0:
            client.close()
            raise PoolUnavailable(self._refusal(_BOOK.outcome(code), 1))

    def _register(self, client: Any, address: int, size: int) -> None:
        code = client.register_buffer(address, size)
        if code != 0:
            raise KvppError(
                f"MemCache did not register {size:,} bytes at {address:#x}: {_BOOK.outcome(code)}"
            )

    def _check_role(self, verb: str) -> None:
        if not self._moves_data:
            raise KvppError(f"a scheduler's MemCache client cannot {verb}: it holds no memory")

    def _put(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        starts, sizes = [list(b.addresses) for b in buffers], [list(b.sizes) for b in buffers]
        codes = self._call(
            keys,
            "batch_put_from_layers",
            lambda client: client.batch_put_from_layers(list(keys), starts, sizes, self._kind.save),
        )
        if isinstance(codes, StoreOutcome):
            return all_ended(keys, codes)
        return [_stored(code) for code in codes]


def new_client() -> Any:
    """A DistributedObjectStore of the installed memcache_hybrid.

    Raises:
        PoolUnavailable: it is not installed, or does not fit this machine.
    """
    try:
        module = importlib.import_module("memcache_hybrid")
    except ImportError as error:
        raise PoolUnavailable(
            f"backend=memcache needs the package memcache-hybrid: {error}. Install it on every "
            "node (pip install memcache-hybrid), or use backend=mooncake."
        ) from error
    return module.DistributedObjectStore()


def _stored(code: int) -> StoreOutcome:
    if code == 0:
        return StoreOutcome(StoreResult.STORED)
    if code == _FULL_OR_ANY_ERROR:
        words = "no room; MemCache gives this code for some other errors of a save, too"
        return StoreOutcome(StoreResult.NO_SPACE, code, words)
    return _BOOK.outcome(code)
