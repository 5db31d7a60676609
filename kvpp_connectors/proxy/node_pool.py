"""The nodes of one leg, and which of them gets the next request."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from kvpp_connectors.proxy.errors import NoNode
from kvpp_connectors.proxy.node import Leg, Node

__all__ = ["NodePool"]


class NodePool:
    """The nodes of one leg, chosen by their outstanding work."""

    def __init__(self, leg: Leg, urls: Sequence[str]) -> None:
        self.leg = leg
        self.nodes = tuple(Node(leg, url) for url in urls)
        self._assignments = 0

    @property
    def healthy(self) -> list[Node]:
        """Nodes in rotation."""
        return [node for node in self.nodes if node.healthy]

    def require(self) -> None:
        """Check that a node is in rotation.

        Raises:
            NoNode: none is.
        """
        if not self.healthy:
            raise NoNode(self.leg)

    @contextmanager
    def assigned(self, work: int, avoid: Collection[Node]) -> Iterator[Node]:
        """The healthy node with the least outstanding work; counts ``work`` as its own meanwhile.

        Nodes to ``avoid`` have failed this request and come last. Equal nodes alternate.

        Raises:
            NoNode: no node is in rotation.
        """
        self.require()
        node = min(self.healthy, key=lambda node: (node in avoid, node.work, node.chosen))
        self._assignments += 1
        node.chosen = self._assignments
        node.requests += 1
        node.work += work
        try:
            yield node
        finally:
            node.requests -= 1
            node.work -= work
