"""Ports for servers that are started with a number: reserved until they end.

Mooncake's servers, vLLM's API server and its data-parallel group take a port on their command line
and bind it seconds later; none of them says which one it took if it is given 0. A port that the
kernel chose and that was closed again may meanwhile go to whatever connects or binds port 0.
So these ports lie outside the kernel's ephemeral range: only who names one gets it. Among processes
of this project a name in the abstract Unix namespace keeps a port: it is seen in the same network
namespace as the port, needs no file, and ends with the process that holds it.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

__all__ = ["ephemeral_ports", "reserved_ports"]

# Below are other services' well-known ports, and those that Mooncake's clients (12300 to 14300) and
# transfer engines (15000 to 17000) choose for themselves.
_LOWEST = 18_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def ephemeral_ports() -> range:
    """What the kernel chooses from for a socket that connects or binds port 0."""
    lowest, highest = map(int, _EPHEMERAL.read_text().split())
    return range(lowest, highest + 1)


@contextmanager
def reserved_ports(count: int, host: str = "127.0.0.1") -> Iterator[Sequence[int]]:
    """``count`` consecutive ports of an address of this host on which nobody listens.

    Nobody else gets them while the block runs, which is to last as long as their servers.
    Where the ephemeral range leaves no port free, they are taken from it: then only processes
    of this project keep off them.

    Raises:
        OSError: ``host`` is no address of this host, or no such ports are free.
    """
    with closing(socket.socket()) as probe:
        probe.bind((host, 0))  # an address of somebody else fails here, not at every port
    for ports in _candidates(count):
        with ExitStack() as stack:
            if all(_reserve(port, host, stack) for port in ports):
                yield ports
                return
    raise OSError(f"no {count} consecutive ports of {host} are free")


def _candidates(count: int) -> list[range]:
    """Runs of ports in random order: processes that start together rarely want the same."""
    ephemeral = ephemeral_ports()
    runs = [range(first, first + count) for first in range(_LOWEST, 65_536 - count + 1, count)]
    outside = [run for run in runs if run.stop <= ephemeral.start or ephemeral.stop <= run.start]
    chosen = outside or runs
    random.shuffle(chosen)
    return chosen


def _reserve(port: int, host: str, stack: ExitStack) -> bool:
    """Whether the port is free and now ours, until ``stack`` ends."""
    name = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
    try:
        name.bind(f"\0kvpp-connectors/port/{port}")
        for address in (host, ""):  # a server may listen on all interfaces
            with closing(socket.socket()) as probe:
                probe.bind((address, port))
    except OSError:
        return False
    return True
