"""Background probes of every node's /health."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

from kvpp_connectors.log import get_logger
from kvpp_connectors.proxy.node import Node

__all__ = ["Prober"]

_LOG = get_logger(__name__)


class Prober:
    """Probes each node every ``interval`` seconds, and at once after a request failed there.

    ``probe`` must have a timeout, and marks the node up, down or slow.
    """

    def __init__(
        self, nodes: Iterable[Node], probe: Callable[[Node], Awaitable[None]], interval: float
    ) -> None:
        self._nodes = tuple(nodes)
        self._probe = probe
        self._interval = interval
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Probe every node once, then keep probing in the background."""
        await asyncio.gather(*map(self._probe, self._nodes))
        for node in self._nodes:
            task = asyncio.get_running_loop().create_task(self._watch(node))
            task.add_done_callback(_report)
            self._tasks.append(task)

    async def close(self) -> None:
        """End all probes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, node: Node) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await node.probe_now.wait()
            node.probe_now.clear()
            await self._probe(node)


def _report(task: asyncio.Task[None]) -> None:
    """Log a watch that ended other than by being cancelled: that is a bug."""
    if not task.cancelled() and (error := task.exception()):
        _LOG.critical("the probes of a node have ended", exc_info=error)
