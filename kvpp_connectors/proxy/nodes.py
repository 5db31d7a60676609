"""Back-ends, whether they answer, and which of them gets the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from kvpp_connectors.log import get_logger
from kvpp_connectors.proxy.problems import NoNode

__all__ = ["Leg", "Node", "Pool"]

_LOG = get_logger(__name__)
_MISSES = 2  # probes in a row that may time out: a busy server is slow, not dead


class Leg(StrEnum):
    """The two halves of a request."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Node:
    """One back-end in one leg, and what the proxy knows of it."""

    leg: Leg
    url: str
    healthy: bool = False  # until the first probe
    requests: int = 0  # running now
    work: int = 0  # of the running requests, see Call.work
    chosen: int = 0  # the pool's turn in which it was last chosen
    slow_probes: int = 0  # in a row
    doubted: asyncio.Event = field(default_factory=asyncio.Event)  # probe it now

    def __str__(self) -> str:
        return self.url

    def seen_up(self) -> None:
        """A probe was answered: back into rotation."""
        self.slow_probes = 0
        if not self.healthy:
            _LOG.info("%s node %s is up", self.leg, self.url)
        self.healthy = True

    def seen_down(self, why: str) -> None:
        """It does not answer, or says that it is ill: out of rotation until a probe succeeds."""
        if self.healthy:
            _LOG.warning("%s node %s is down: %s", self.leg, self.url, why)
        self.healthy = False

    def seen_slow(self, why: str) -> None:
        """A probe timed out."""
        self.slow_probes += 1
        if self.slow_probes >= _MISSES:
            self.seen_down(why)


class Pool:
    """The nodes of one leg."""

    def __init__(self, leg: Leg, urls: Sequence[str]) -> None:
        self.leg = leg
        self.nodes = tuple(Node(leg, url) for url in urls)
        self._turn = 0

    @property
    def healthy(self) -> list[Node]:
        """Nodes in rotation."""
        return [node for node in self.nodes if node.healthy]

    def require(self) -> None:
        """Raises NoNode if no node is in rotation."""
        if not self.healthy:
            raise NoNode(self.leg)

    @contextmanager
    def assigned(self, work: int, avoid: Collection[Node]) -> Iterator[Node]:
        """The healthy node with the least outstanding work, which gets ``work`` on top of it.

        Nodes to ``avoid`` have failed this request: they come only after all others. Equal nodes
        take turns.

        Raises:
            NoNode: no node is in rotation.
        """
        self.require()
        node = min(self.healthy, key=lambda node: (node in avoid, node.work, node.chosen))
        self._turn += 1
        node.chosen = self._turn
        node.requests += 1
        node.work += work
        try:
            yield node
        finally:
            node.requests -= 1
            node.work -= work
