"""A store behind a circuit breaker, with the one loop that connects and reconnects it.

A dead or stuck store costs its callers a few failed calls; then nobody waits for it any more, until
the loop finds that it answers again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from kvpp_connectors.connector.threads import start_thread
from kvpp_connectors.log import get_logger
from kvpp_connectors.pool.stats import PoolStats
from kvpp_connectors.pool.store.base import (
    Buffer,
    PoolUnavailable,
    Store,
    StoreOutcome,
    StoreResult,
    all_ended,
)
from kvpp_connectors.pool.store.circuit_breaker import Breaker, BreakerState

__all__ = ["ResilientStore"]

logger = get_logger(__name__)

_START_S = 10.0
_JOIN_S = 15.0  # Mooncake's longest set-up


class ResilientStore:
    """A Store that never keeps anybody waiting for a store that is known to be gone.

    Starts a thread that connects at once; nothing waits for it but ``wait_ready`` and
    ``wait_at_start``.
    """

    def __init__(
        self,
        store: Store,
        stats: PoolStats,
        opens_after: int = 3,
        pause_s: float = 0.5,
        longest_pause_s: float = 8.0,
        *,
        device: torch.device | None = None,
    ) -> None:
        """``opens_after`` failed calls in a row open the breaker; ``pause_s`` then to a probe.

        ``device``: where the memory lies that is registered with the store.
        """
        self._store = store
        self._stats = stats
        self._breaker = Breaker(opens_after, pause_s, longest_pause_s)
        self._reason = "not connected yet"
        self._stopped = threading.Event()
        self._loop = start_thread(
            "kvpp-pool-connect",
            self._reconnect,
            f"the {self.name} pool is not connected again after its next failure; restart the "
            "engine",
            device=device,
        )

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def packed(self) -> bool:
        return self._store.packed

    @property
    def state(self) -> BreakerState:
        """Of the breaker."""
        return self._breaker.state

    @property
    def reason(self) -> str:
        """Why the breaker is not closed; what it last was if it is."""
        return self._reason

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the store answers; False if it did not in time, and the loop goes on."""
        return self._breaker.wait_closed(timeout_s)

    def wait_at_start(self) -> None:
        """Wait a while for the store, so that the first requests are found and saved, too."""
        if not self.wait_ready(_START_S):
            logger.warning("no pool after %g s (%s); serving without it", _START_S, self._reason)

    def connect(self) -> None:
        """See Store. For the loop; raises what the store's does."""
        self._store.connect()

    def register(self, address: int, size: int) -> None:
        self._store.register(address, size)

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self._refuse_if_open()
        started = time.perf_counter()
        try:
            found = self._store.exist(keys)
        except PoolUnavailable as error:
            self._count("exist", started)
            self._stats.add("exist_unavailable", len(keys))
            self._failed(str(error))
            raise
        self._count("exist", started)
        self._breaker.succeeded()
        self._stats.add("exist_keys", len(keys))
        return found

    def put(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        return self._move("put", self._store.put, keys, buffers)

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        return self._move("get", self._store.get, keys, buffers)

    def close(self) -> None:
        """See Store. Ends the loop, too."""
        self._stopped.set()
        self._breaker.wake()
        self._store.close()
        self._loop.join(_JOIN_S)

    def _refuse_if_open(self) -> None:
        if not self._breaker.closed:
            self._stats.add("breaker_refused")
            raise PoolUnavailable(f"the {self.name} pool is left alone for now: {self._reason}")

    def _move(
        self,
        operation: str,
        call: Callable[[Sequence[str], Sequence[Buffer]], list[StoreOutcome]],
        keys: Sequence[str],
        buffers: Sequence[Buffer],
    ) -> list[StoreOutcome]:
        try:
            self._refuse_if_open()
        except PoolUnavailable as error:
            outcomes = all_ended(keys, StoreOutcome(StoreResult.UNAVAILABLE, words=str(error)))
            self._stats.add(f"{operation}_unavailable", len(keys))
            return outcomes
        started = time.perf_counter()
        outcomes = call(keys, buffers)
        self._count(operation, started)
        moved = (b.total for b, o in zip(buffers, outcomes, strict=True) if o.ok)
        self._stats.add(f"{operation}_bytes", sum(moved))
        self._stats.record(operation, keys, outcomes)
        gone = [o for o in outcomes if o.result is StoreResult.UNAVAILABLE]
        if gone:
            self._failed(str(gone[0]))
        else:
            self._breaker.succeeded()
        return outcomes

    def _count(self, operation: str, started: float) -> None:
        self._stats.add(f"{operation}_us", int((time.perf_counter() - started) * 1e6))

    def _failed(self, reason: str) -> None:
        self._reason = reason
        if self._breaker.failed():
            self._stats.add("breaker_opened")
            self._stats.warn_once(
                "breaker", f"the {self.name} pool is left alone for now: {reason}"
            )

    def _reconnect(self) -> None:
        """The loop: connect or probe whenever the breaker says so, until close()."""
        while self._breaker.wait_for_probe(self._stopped.is_set):
            try:
                self._store.connect()
            except (RuntimeError, OSError) as error:
                self._reason = str(error)
                self._breaker.probe_ended(answered=False)
                if not self._stopped.is_set():
                    self._stats.add("breaker_probes_failed")
                    self._stats.warn_once("connect", f"no {self.name} pool: {error}")
            else:
                self._stats.add("breaker_closed")
                self._stats.recovered()
                self._breaker.probe_ended(answered=True)
                logger.info("the %s pool answers", self.name)
