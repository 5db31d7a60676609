"""One back-end of one leg, and whether it answers its health probes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from kvpp_connectors.log import get_logger

__all__ = ["Leg", "Node"]

_LOG = get_logger(__name__)
_SLOW_PROBES = 2  # in a row take a node out of rotation: a busy server is slow, not dead


class Leg(StrEnum):
    """The two halves of a request."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Node:
    """A back-end in one leg: its health, and the work that the proxy has sent to it."""

    leg: Leg
    url: str
    healthy: bool = False  # until the first probe
    requests: int = 0  # running now
    work: int = 0  # of the running requests, see Call.work
    chosen: int = 0  # number of the pool's assignment that chose it last
    slow_probes: int = 0  # in a row
    probe_now: asyncio.Event = field(default_factory=asyncio.Event)  # a request failed here

    def __str__(self) -> str:
        return self.url

    def mark_up(self) -> None:
        """Put it into rotation: it answered a probe."""
        self.slow_probes = 0
        if not self.healthy:
            _LOG.info("%s node %s is up", self.leg, self.url)
        self.healthy = True

    def mark_down(self, why: str) -> None:
        """Take it out of rotation until a probe succeeds."""
        if self.healthy:
            _LOG.warning("%s node %s is down: %s", self.leg, self.url, why)
        self.healthy = False

    def mark_slow(self, why: str) -> None:
        """Count a probe that timed out; several in a row take it out of rotation."""
        self.slow_probes += 1
        if self.slow_probes >= _SLOW_PROBES:
            self.mark_down(why)
