"""The ports that the workers of a launch listen at: whole ranges that do not overlap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from kvpp_connectors.connector.names import P2P
from kvpp_connectors.launch.facts import Launch
from kvpp_connectors.launch.problems import Problem

__all__ = ["port_problems"]

_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class PortRange:
    """``[first, last]``: one port for each worker of all data-parallel engines."""

    option: str
    first: int
    count: int

    @property
    def last(self) -> int:
        """The port of the last worker."""
        return self.first + self.count - 1

    def __str__(self) -> str:
        return f"{self.first} to {self.last} ({self.option})"


def port_problems(launch: Launch) -> Iterator[Problem]:
    """What is wrong with the ports of a launch."""
    workers = launch.dp * launch.workers
    ranges = []
    for option, written, free in _options(launch):
        port = _number(written)
        if port == 0 and free:
            continue
        if port is None or not 1 <= port <= _LAST_PORT - workers + 1:
            yield Problem(
                "port-range", option, repr(written),
                f"The worker of rank r listens at this port + r, for r < {workers}; ports are "
                f"numbers from 1 to {_LAST_PORT}.",
                f"Give a number from 1 to {_LAST_PORT - workers + 1}"
                f"{', or 0 for free ports' if free else ''}.",
            )  # fmt: skip
        else:
            ranges.append(PortRange(option, port, workers))
    for one, other in combinations(ranges, 2):
        if one.first <= other.last and other.first <= one.last:
            yield Problem(
                "ports-overlap", other.option, str(other.first),
                f"Workers would listen twice at the same ports: {one} and {other}.",
                f"Leave {workers} ports to each.",
            )  # fmt: skip


def _options(launch: Launch) -> Iterator[tuple[str, object, bool]]:
    """(option, what is written there, whether 0 asks for free ports)."""
    p2p = next((connector for connector in launch.connectors if connector.name == P2P), None)
    if p2p is not None:
        yield f"{p2p.path}.kv_port", p2p.port, True
    first = launch.settings.options.metrics_port
    if launch.kvpp and first is not None:
        yield "additional_config.kvpp.metrics_port", first, False


def _number(written: object) -> int | None:
    """A port as vLLM reads it: a number, or a text of digits."""
    if isinstance(written, str) and written.strip().lstrip("-").isdecimal():
        return int(written[:12])
    return written if isinstance(written, int) and not isinstance(written, bool) else None
