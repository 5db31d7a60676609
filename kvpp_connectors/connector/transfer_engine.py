"""Mooncake's Transfer Engine: one a process, brought up with settings that keep its promises.

Its defaults would let a stalled peer hold a read for 30 seconds and a retry fail for the queue that
the first try filled (docs/p2p_protocol.md). What the environment sets already is kept.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpp_connectors.connector.host import endpoint
from kvpp_connectors.log import get_logger
from kvpp_core.errors import KvppError

__all__ = [
    "ALIGNMENT",
    "PROTOCOLS",
    "SETTINGS",
    "Read",
    "TransferEngine",
    "default_protocol",
    "set_environment",
]

logger = get_logger(__name__)

PROTOCOLS = ("tcp", "rdma", "ascend")
ALIGNMENT = 2 << 20  # bytes: HCCS and RDMA transfers of NPUs want addresses at multiples of 2 MiB
_ALIGNMENTS = {"ascend": ALIGNMENT}  # of what is registered
SETTINGS = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "15",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "15",
    "MC_TRANSFER_TIMEOUT": "30",
    "MC_TCP_SLICE_SIZE": "262144",
}


@dataclass(frozen=True, slots=True)
class Read:
    """``size`` bytes from address ``remote`` of ``session`` to address ``local``."""

    session: str
    remote: int
    local: int
    size: int


def default_protocol(device_type: str) -> str:
    """The transport of a platform."""
    return {"cpu": "tcp", "cuda": "rdma", "npu": "ascend"}.get(device_type, "tcp")


def set_environment(settings: Mapping[str, str], protocol: str) -> None:
    """Give Mooncake its settings, before it reads them. What the environment has already is kept:
    of two parts of a process the first one decides.
    """
    os.environ.update({k: v for k, v in settings.items() if k not in os.environ})
    if protocol == "tcp":
        os.environ.setdefault("MC_FORCE_TCP", "1")


class TransferEngine:
    """One engine: registers memory and reads from peers. Reads may come from several threads."""

    def __init__(self, host: str, protocol: str) -> None:
        ipv6 = {"MC_USE_IPV6": "1"} if ":" in host else {}
        set_environment(SETTINGS | ipv6, protocol)
        try:
            from mooncake.engine import TransferEngine as Engine
        except ImportError as error:
            raise KvppError(
                f"Mooncake's Transfer Engine cannot be imported: {error}. Install "
                "mooncake-transfer-engine (mooncake-transfer-engine-non-cuda on CPU) and "
                "libibverbs1."
            ) from error
        self._engine: Any = Engine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if code != 0:
            raise KvppError(
                f"Mooncake's Transfer Engine did not start on {host} with {protocol} (code {code})"
            )
        self.protocol = protocol
        self.session = endpoint(host, self._engine.get_rpc_port())
        self._registered: dict[int, int] = {}  # address -> bytes
        self._registering = threading.Lock()  # a pool connects on a thread of its own

    @property
    def raw(self) -> Any:
        """Mooncake's own object, to measure it."""
        return self._engine

    def register(self, start: int, size: int) -> None:
        """Let peers, and a pool's client of this engine, use ``size`` bytes from an address.

        Mooncake takes no byte twice: what lies within a range that is registered is left alone.
        Caches on NPUs start at multiples of 2 MiB in storages that have that much more: what lies
        before the first multiple is left out.

        Raises:
            KvppError: the engine refused it.
        """
        skipped = -start % _ALIGNMENTS.get(self.protocol, 1)
        start, size = start + skipped, size - skipped
        with self._registering:
            if size <= 0 or self._covers(start, size):
                return
            code = self._engine.register_memory(start, size)
            if code != 0:
                raise KvppError(f"Mooncake did not register {size:,} bytes (code {code})")
            self._registered[start] = size

    def _covers(self, start: int, size: int) -> bool:
        known = self._registered.items()
        return any(begin <= start and start + size <= begin + length for begin, length in known)

    def start_read(self, read: Read) -> int | None:
        """Submit one read of its own; a handle, or None if it was not accepted."""
        handle = self._engine.batch_transfer_async_read(
            read.session, [read.local], [read.remote], [read.size]
        )
        return int(handle) or None

    def poll(self, handle: int) -> bool | None:
        """True: done. False: failed, and nothing is written any more. None: in flight."""
        state = self._engine.transfer_check_status(handle)
        return None if state == 0 else state == 1
