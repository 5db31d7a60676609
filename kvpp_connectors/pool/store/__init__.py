"""Stores that hold the pool's objects: one contract (base.py), and the store that a launch asks
for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvpp_connectors.pool.store.base import Store

if TYPE_CHECKING:
    import torch

__all__ = ["create_store"]


def create_store(
    name: str,
    extra: Mapping[str, Any],
    host: str,
    device_type: str,
    *,
    device: torch.device | None,
) -> Store:
    """Make it; it does not connect yet.

    Args:
        name: mooncake or memcache.
        extra: ``kv_connector_extra_config``.
        host: address of this process.
        device_type: where the caches lie.
        device: this worker's, on this host; None for a scheduler, which only asks.

    Raises:
        KvppError: its settings are missing or wrong.
    """
    if name == "memcache":
        from kvpp_connectors.pool.store.memcache import MemCacheStore, MemoryKind

        kind = MemoryKind.HOST if device_type == "cpu" else MemoryKind.DEVICE
        index = 0 if device is None else device.index or 0
        return MemCacheStore(kind, index, moves_data=device is not None)
    from kvpp_connectors.connector.process import process_engine
    from kvpp_connectors.connector.transfer_engine import default_protocol
    from kvpp_connectors.pool.store.mooncake import MooncakeStore
    from kvpp_connectors.pool.store.mooncake_settings import read_mooncake_settings

    settings = read_mooncake_settings(extra, os.environ)
    protocol = settings.protocol or default_protocol(device_type)
    if device is None:
        return MooncakeStore(settings, host, protocol, 0)
    engine = process_engine(settings.local_hostname or host, protocol)
    return MooncakeStore(settings, host, protocol, settings.global_segment_size, engine)
