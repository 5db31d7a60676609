"""A worker's saves, which run beside the model: whose blocks are still read, and who is saved."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch

from kvpp_connectors.connector.threads import log_error, make_executor
from kvpp_connectors.pool.messages import Life
from kvpp_connectors.pool.stats import PoolStats

__all__ = ["SaveQueue"]


@dataclass(frozen=True, slots=True)
class _RunningSave:
    """It reads the blocks until ``copied``."""

    copied: Future[None]
    ended: Future[None]


class SaveQueue:
    """Saves by life of a request, on one thread. Methods are for the model's thread."""

    def __init__(self, device: torch.device, hold_timeout_s: float, stats: PoolStats) -> None:
        """``hold_timeout_s``: how long a preemption waits before that is logged."""
        self._thread = make_executor("kvpp-pool-save", device=device)
        self._hold_timeout_s, self._stats = hold_timeout_s, stats
        self._running: dict[Life, list[_RunningSave]] = {}  # until the life is over
        self._over: set[Life] = set()  # lives that no save will be added to

    def submit(
        self, life: Life, save: Callable[[Callable[[], object]], object], ready: torch.Event | None
    ) -> None:
        """Run ``save`` once the device is at ``ready``. It calls what it is given when it does not
        read the blocks any more, at the latest when it returns."""
        copied: Future[None] = Future()

        def run() -> None:
            try:
                if ready is not None:
                    ready.synchronize()
                save(lambda: copied.set_result(None))
            finally:
                if not copied.done():
                    copied.set_result(None)

        ended = log_error(
            self._thread.submit(run),
            f"request {life.request_id}: a save into the pool ended with an error; its blocks are "
            "not in it",
        )
        self._running.setdefault(life, []).append(_RunningSave(copied, ended))

    def release(self, lives: Collection[Life]) -> None:
        """Return when no save reads a block of these lives any more; they are forgotten."""
        copied = [save.copied for life in lives for save in self._running.get(life, ())]
        _, late = wait(copied, self._hold_timeout_s)
        if late:
            self._stats.warn_once(
                "save/held",
                f"{len(late)} saves still read blocks of preempted requests after "
                f"{self._hold_timeout_s:g} s; waiting on",
            )
            wait(late)
        for life in lives:
            self._running.pop(life, None)

    def end(self, lives: Collection[Life]) -> None:
        """These lives are over once their saves have ended."""
        self._over |= set(lives)

    def pop_saved(self) -> set[str]:
        """Requests whose lives are over since the last call."""
        saved = {
            life
            for life in self._over
            if all(save.ended.done() for save in self._running.get(life, ()))
        }
        self._over -= saved
        for life in saved:
            self._running.pop(life, None)
        return {life.request_id for life in saved}

    def close(self) -> None:
        """Saves that have not begun are dropped."""
        self._thread.shutdown(cancel_futures=True)
