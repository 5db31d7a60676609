"""Mooncake's store as a pool. What it does was found by experiment and is tested for real.

- A put that answers 0 may have stored nothing: another client's unfinished put of the key swallows
  it for up to 30 s. So the object is asked for afterwards.
- A full pool says "no space" while it evicts in the background; some milliseconds later there is
  some.
- A get into a larger buffer is a success with the object's own size; into a smaller one an
  "invalid argument"; into several pieces that are too large a "transfer error".
- Calls into a client that is not set up, or closed, end the process: see client.py.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from kvpp_connectors.connector.transfer_engine import SETTINGS, TransferEngine, set_environment
from kvpp_connectors.pool.store.base import (
    Buffer,
    PoolUnavailable,
    StoreOutcome,
    StoreResult,
    all_ended,
)
from kvpp_connectors.pool.store.client import CodeBook, StoreClient
from kvpp_connectors.pool.store.mooncake_settings import MooncakeSettings
from kvpp_core.errors import KvppError

__all__ = ["MooncakeStore"]

_MASTER_CONNECT_S = 1.0
_TRANSFER_FAILED, _LEASE_EXPIRED, _INVALID_ARGUMENT, _NO_SPACE = -800, -707, -600, -200
_WORTH_A_RETRY = (_TRANSFER_FAILED, _LEASE_EXPIRED)
_BOOK = CodeBook(
    "Mooncake",
    {
        _NO_SPACE: (StoreResult.NO_SPACE, "no segment has room, and nothing could be evicted yet"),
        _INVALID_ARGUMENT: (StoreResult.FAILED, "Mooncake calls an argument invalid"),
        -703: (StoreResult.MISSING, "its writer has not finished it"),
        -704: (StoreResult.MISSING, "not in the pool: never saved, or evicted"),
        -705: (StoreResult.ALREADY_THERE, "saved already, or being saved"),
        -706: (StoreResult.FAILED, "it has a lease"),
        _LEASE_EXPIRED: (StoreResult.LEASE_EXPIRED, "its lease ended while it was read; give the "
                         "master a longer --default_kv_lease_ttl"),
        _TRANSFER_FAILED: (StoreResult.FAILED, "the bytes could not be moved: their owner is gone, "
                           "stuck, or out of reach"),
        -900: (StoreResult.UNAVAILABLE, "mooncake_master does not answer: it is gone"),
        -901: (StoreResult.UNAVAILABLE, "mooncake_master did not answer in time: it is stuck"),
        -1700: (StoreResult.NO_SPACE, "the tenant's quota is used up"),
        -1701: (StoreResult.FAILED, "mooncake_master does not know this tenant_id"),
    },
)  # fmt: skip
_TRIED = StoreOutcome(StoreResult.FAILED, words="about to be tried")
# Mooncake's own bounds are 30 s for a stuck master or peer, and 90 s for a set-up.
_ENVIRONMENT = {
    **SETTINGS,
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
}


class MooncakeStore(StoreClient):
    """One client of a Mooncake store.

    Clients of a master that came back join it by themselves, within 2 s. Closing takes 1 to 2 s.
    """

    name = "mooncake"
    _book = _BOOK
    _close_wait_s = 10.0

    def __init__(
        self,
        settings: MooncakeSettings,
        host: str,
        protocol: str,
        segment_bytes: int,
        engine: TransferEngine | None = None,
    ) -> None:
        """Do not connect yet.

        Args:
            settings: as read.
            host: address by which other clients reach this one; ``local_hostname`` wins.
            protocol: of the platform; ``settings.protocol`` wins.
            segment_bytes: memory to give to the pool; 0 for a scheduler, which only asks.
            engine: this process's transfer engine; None for a scheduler.
        """
        super().__init__()
        self._settings = settings
        self._host = settings.local_hostname or host
        self._protocol = settings.protocol or protocol
        self._segment_bytes = segment_bytes
        self._engine = engine

    @property
    def packed(self) -> bool:
        """Over tcp every piece costs a request of its own, so that packing is 5 times faster."""
        return self._protocol == "tcp"

    def put(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        try:
            there = self.exist(keys)
        except PoolUnavailable as error:
            return all_ended(keys, StoreOutcome(StoreResult.UNAVAILABLE, words=str(error)))
        outcomes = [
            StoreOutcome(StoreResult.ALREADY_THERE) if found else self._too_large(buffer)
            for found, buffer in zip(there, buffers, strict=True)
        ]
        missing = [i for i, outcome in enumerate(outcomes) if outcome is _TRIED]
        pauses = [pause_ms / 1000 for pause_ms in self._settings.no_space_waits_ms]
        self._put_missing(
            keys, buffers, outcomes, missing, pauses, lambda outcome: outcome.code == _NO_SPACE
        )
        self._verify(keys, outcomes)
        return outcomes

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        outcomes = self._get(keys, buffers)
        # The first transfer after a peer's failure may find its connections broken, the first one
        # to a peer may take longer than a short lease; the next ones not.
        again = [
            i
            for i, outcome in enumerate(outcomes)
            if outcome.code in _WORTH_A_RETRY and outcome.result is not StoreResult.WRONG_LENGTH
        ]
        if again:
            ended = self._get([keys[i] for i in again], [buffers[i] for i in again])
            for i, outcome in zip(again, ended, strict=True):
                outcomes[i] = outcome
        return outcomes

    def clear(self, prefix: str) -> int:
        """Remove the objects whose key starts with ``prefix``; how many there were.

        Those with a lease stay: somebody may be reading them, and would read what comes after.

        Raises:
            PoolUnavailable: the store cannot be asked.
            KvppError: the prefix is not one of ours, or the store refused.
        """
        if not prefix.startswith("kvpp") or not all(c.isalnum() or c in "@-" for c in prefix):
            raise KvppError(f"{prefix!r} is no prefix of a pool's keys; expected kvpp...@...")
        with self.client() as client:
            removed = int(client.remove_by_regex(f"^{prefix}", False))
        if removed < 0:
            raise PoolUnavailable(f"the pool was not cleared: {_BOOK.outcome(removed)}")
        return removed

    @property
    def _registers(self) -> bool:
        """Over tcp Mooncake copies to and from any memory of this process."""
        return self._protocol != "tcp"

    def _refusal(self, outcome: StoreOutcome, keys: int) -> str:
        return f"{outcome} (master {self._settings.master_server_address}, {keys} keys)"

    def _register(self, client: Any, address: int, size: int) -> None:
        if self._engine is not None:  # P/D registers the caches with it, too
            self._engine.register(address, size)
            return
        code = client.register_buffer(address, size)
        if code != 0:
            raise KvppError(
                f"Mooncake did not register {size:,} bytes at {address:#x} over {self._protocol} "
                f"(code {code}); it refuses memory that overlaps what is registered already"
            )

    def _set_up(self) -> Any:
        master = self._settings.master_server_address
        _check_master(master)
        set_environment(_ENVIRONMENT, self._protocol)
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise PoolUnavailable(
                f"Mooncake's store cannot be imported: {error}. Install mooncake-transfer-engine "
                "(mooncake-transfer-engine-non-cuda on CPU) and libibverbs1."
            ) from error
        client = MooncakeDistributedStore()
        settings = self._settings
        code = client.setup(
            self._engine.session if self._engine else self._host,
            settings.metadata_server,
            self._segment_bytes,
            settings.local_buffer_size,
            self._protocol,
            settings.device_name,
            master,
            engine=self._engine.raw.get_engine() if self._engine else None,
            enable_ssd_offload=settings.enable_ssd_offload,
            ssd_offload_path=settings.ssd_offload_path,
            tenant_id=settings.tenant_id,
        )
        if code != 0:
            raise PoolUnavailable(
                f"Mooncake's client did not start on {self._host} over {self._protocol} with "
                f"{self._segment_bytes:,} bytes for the pool and master {master}: "
                f"{_BOOK.outcome(code)}"
            )
        return client

    def _put(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        names, starts_of, sizes_of = list(keys), *_pieces(buffers)

        def call(client: Any) -> object:
            if all(len(sizes) == 1 for sizes in sizes_of):
                starts, sizes = [s for (s,) in starts_of], [s for (s,) in sizes_of]
                config = self._replication(client, in_pieces=False)
                return client.batch_put_from(names, starts, sizes, config)
            config = self._replication(client, in_pieces=True)
            return client.batch_put_from_multi_buffers(names, starts_of, sizes_of, config)

        codes = self._call(keys, "batch_put_from", call)
        if isinstance(codes, StoreOutcome):
            return all_ended(keys, codes)
        return [
            StoreOutcome(StoreResult.STORED) if code == 0 else _BOOK.outcome(code) for code in codes
        ]

    def _too_large(self, buffer: Buffer) -> StoreOutcome:
        """Keep back what no segment can hold: Mooncake would evict others for it, in vain."""
        if not 0 < self._segment_bytes < buffer.total:
            return _TRIED
        words = (
            f"an object of {buffer.total:,} bytes does not fit a segment of "
            f"{self._segment_bytes:,} bytes; raise global_segment_size"
        )
        return StoreOutcome(StoreResult.NO_SPACE, words=words)

    def _verify(self, keys: Sequence[str], outcomes: list[StoreOutcome]) -> None:
        """Make STORED what is not there NOT_KEPT."""
        stored = [i for i, outcome in enumerate(outcomes) if outcome.result is StoreResult.STORED]
        if not stored or not self._settings.verify_puts:
            return
        try:
            there = self.exist([keys[i] for i in stored])
        except PoolUnavailable as error:
            lost = StoreOutcome(
                StoreResult.UNAVAILABLE, words=f"saved, but not to be verified: {error}"
            )
            there = [False] * len(stored)
        else:
            lost = StoreOutcome(
                StoreResult.NOT_KEPT,
                0,
                "Mooncake accepted it, yet it is not there: another client's unfinished save of "
                "the key, or evicted at once",
            )
        for i, found in zip(stored, there, strict=True):
            if not found:
                outcomes[i] = lost

    def _get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        names, starts_of, sizes_of = list(keys), *_pieces(buffers)

        def call(client: Any) -> object:
            if all(len(sizes) == 1 for sizes in sizes_of):
                starts, sizes = [s for (s,) in starts_of], [s for (s,) in sizes_of]
                return client.batch_get_into(names, starts, sizes)
            return client.batch_get_into_multi_buffers(
                names, starts_of, sizes_of, self._settings.prefer_alloc_in_same_node
            )

        codes = self._call(keys, "batch_get_into", call)
        if isinstance(codes, StoreOutcome):
            return all_ended(keys, codes)
        return [
            self._loaded(key, buffer, code)
            for key, buffer, code in zip(keys, buffers, codes, strict=True)
        ]

    def _loaded(self, key: str, buffer: Buffer, code: int) -> StoreOutcome:
        if code == buffer.total:
            return StoreOutcome(StoreResult.LOADED)
        if code == _INVALID_ARGUMENT or (code == _TRANSFER_FAILED and len(buffer.sizes) > 1):
            size = self._size(key)
            if size <= 0 or size == buffer.total:
                return _BOOK.of_load(code)
        elif code <= 0:
            return (
                _BOOK.of_load(code)
                if code
                else StoreOutcome(StoreResult.FAILED, 0, "no bytes came")
            )
        else:
            size = code
        return StoreOutcome(
            StoreResult.WRONG_LENGTH, code, f"it has {size:,} bytes; expected {buffer.total:,}"
        )

    def _size(self, key: str) -> int:
        codes = self._call([key], "get_size", lambda client: [client.get_size(key)])
        return 0 if isinstance(codes, StoreOutcome) else codes[0]

    def _replication(self, client: Any, in_pieces: bool) -> Any:
        from mooncake.store import ReplicateConfig

        config = ReplicateConfig()
        config.replica_num = self._settings.replica_num
        if in_pieces:  # Mooncake refuses it for single buffers
            config.prefer_alloc_in_same_node = self._settings.prefer_alloc_in_same_node
        if self._settings.preferred_segment:
            config.preferred_segment = client.get_hostname()
        return config


def _pieces(buffers: Sequence[Buffer]) -> tuple[list[list[int]], list[list[int]]]:
    return [list(b.addresses) for b in buffers], [list(b.sizes) for b in buffers]


def _check_master(address: str) -> None:
    """See that something listens there: Mooncake itself would take 4 s and more to say no."""
    host, colon, port = address.rpartition(":")
    if "://" in address:
        return  # a service that knows the masters
    if not colon or not port.isdecimal():
        raise PoolUnavailable(
            f"master_server_address = {address!r} is not host:port, nor a URL such as etcd://..."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _MASTER_CONNECT_S).close()
    except OSError as error:
        raise PoolUnavailable(
            f"no mooncake_master listens on {address}: {error}. Start one "
            f"(kvpp pool up --host {host} --port {port}) or correct master_server_address."
        ) from error
