"""Releases of transfers that no decode node will read, before prefill's leases expire."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import Counter

from kvpp_connectors.log import get_logger

__all__ = ["NoReleaser", "PrefillTransfer", "ReleaseRunner", "Releaser"]

_LOG = get_logger(__name__)
_THREADS = 8


class Releaser(Protocol):
    """Releases transfers of one kind of connector. A module with this function is one, too."""

    def release(self, kv_transfer_params: dict[str, Any], /) -> bool:
        """Tell the prefill engine that nobody reads this transfer (any more).

        Runs in a thread of its own: it may block, for a bounded time. It must be harmless at any
        moment: for a transfer that was read, released or has expired, and while a decode engine
        whose request was cancelled still reads it.

        Returns whether the prefill engine took the message.
        """


class NoReleaser:
    """For connectors without an explicit release: prefill's lease expires."""

    def release(self, kv_transfer_params: dict[str, Any], /) -> bool:
        """Do nothing; prefill was not reached."""
        del kv_transfer_params
        return False


@dataclass(slots=True)
class PrefillTransfer:
    """kv_transfer_params of one prefill. They can be read once, so one decode node gets them."""

    params: dict[str, Any] | None
    used: bool = False


class ReleaseRunner:
    """Runs releases in the background, each for ``seconds`` at most."""

    def __init__(self, releaser: Releaser, seconds: float, counter: Counter) -> None:
        self._releaser = releaser
        self._seconds = seconds
        self._counter = counter
        self._running: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvpp-release")

    @contextmanager
    def held(self, params: dict[str, Any] | None, request_id: str) -> Iterator[PrefillTransfer]:
        """A transfer that is released at the end of the block unless ``used`` was set."""
        transfer = PrefillTransfer(params)
        try:
            yield transfer
        finally:
            if params is not None and not transfer.used:
                self.release(params, request_id)

    def release(self, params: dict[str, Any], request_id: str) -> None:
        """Start a release; returns at once, also in a task that is being cancelled."""
        task = asyncio.get_running_loop().create_task(self._release(params, request_id))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Wait for running releases, within their timeout."""
        if self._running:
            await asyncio.wait(self._running, timeout=self._seconds)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _release(self, params: dict[str, Any], request_id: str) -> None:
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._threads, self._releaser.release, params)
        done, _ = await asyncio.wait({call}, timeout=self._seconds)
        if not done:
            result = "late"
        elif error := call.exception():
            result = "failed"
            _LOG.error("request %s: its release failed: %r", request_id, error)
        else:
            result = "released" if call.result() else "not_released"
        self._counter.labels(result).inc()
        _LOG.debug("request %s: transfer %s", request_id, result)
