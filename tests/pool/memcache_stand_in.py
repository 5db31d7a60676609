"""InMemoryMemCacheStandIn: MemCache's data plane without an NPU. NOT MemCache.

It answers as facts about memcache_hybrid 1.3.0 say that MemCache does (codes, directions, sizes),
over a dict in this process. What it cannot show: device memory, several processes, real eviction
timing, real leases. test_memcache_real.py tests the control plane against the real MetaService.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

__all__ = ["InMemoryMemCacheStandIn", "StandInPool"]

H2G, G2H = 3, 2
OK, FULL, WRONG_DIRECTION, NOT_EXISTS, WRONG_SIZE, NO_LINK = 0, -1, -2, -3007, -3012, -3014


class StandInPool:
    """The objects, shared by all clients of one test."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # bytes
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.reachable = True


class InMemoryMemCacheStandIn:
    """A DistributedObjectStore: the methods that our backend calls, on host memory."""

    def __init__(self, pool: StandInPool) -> None:
        self._pool = pool
        self._ready = False
        self._moves_data = False
        self.registered: list[tuple[int, int]] = []

    def init(self, device_id: int, init_bm: bool = True) -> int:
        assert device_id >= 0
        if not self._pool.reachable:
            return -1
        self._ready, self._moves_data = True, init_bm
        return OK

    def close(self) -> int:
        self._ready = False
        return OK

    def register_buffer(self, address: int, size: int) -> int:
        assert self._ready and self._moves_data, "the real one crashes the process here"
        self.registered.append((address, size))
        return OK

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        self._check()
        if not self._pool.reachable:
            return [NO_LINK] * len(keys)
        with self._pool.lock:
            return [int(key in self._pool.objects) for key in keys]

    def batch_put_from_layers(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        direct: int = H2G,
    ) -> list[int]:
        self._check()
        return [self._put(k, a, s, direct) for k, a, s in zip(keys, addresses, sizes, strict=True)]

    def batch_get_into_layers(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        direct: int = G2H,
    ) -> list[int]:
        self._check()
        return [self._get(k, a, s, direct) for k, a, s in zip(keys, addresses, sizes, strict=True)]

    def _check(self) -> None:
        assert self._ready, "the real one crashes the process here"

    def _put(self, key: str, addresses: Sequence[int], sizes: Sequence[int], direct: int) -> int:
        if direct != H2G:
            return WRONG_DIRECTION
        if not self._pool.reachable:
            return NO_LINK
        data = b"".join(ctypes.string_at(a, s) for a, s in zip(addresses, sizes, strict=True))
        with self._pool.lock:
            if key in self._pool.objects:
                return OK
            used = sum(len(held) for held in self._pool.objects.values())
            if used + len(data) > self._pool.capacity:
                return FULL
            self._pool.objects[key] = data
        return OK

    def _get(self, key: str, addresses: Sequence[int], sizes: Sequence[int], direct: int) -> int:
        if direct != G2H:
            return WRONG_DIRECTION
        if not self._pool.reachable:
            return NO_LINK
        with self._pool.lock:
            data = self._pool.objects.get(key)
        if data is None:
            return NOT_EXISTS
        if len(data) != sum(sizes):
            return WRONG_SIZE
        start = 0
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, data[start : start + size], size)
            start += size
        return OK
