"""Ports that a server binds later stay free until then, whoever connects meanwhile."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from kvpp_connectors.connector.ports import ephemeral_ports, reserved_ports

HOST = "127.0.0.1"
_IP_LOCAL_PORT_RANGE = 51  # linux/in.h, since 6.3: from where the kernel takes a port for a socket

PROGRAM = """
import sys
from kvpp_connectors.connector import ports
ports._candidates = lambda count: [range(port, port + 1) for port in map(int, sys.argv[1:])]
with ports.reserved_ports(1) as got:
    print(*got)
"""

Thief = Callable[[int], socket.socket]


@pytest.fixture
def thief() -> Iterator[Thief]:
    """Takes what the kernel gives for port 0: the port asked for, if it gives that to anybody."""
    with ExitStack() as stack:

        def take(wanted: int) -> socket.socket:
            taker = stack.enter_context(socket.socket())
            try:
                only = struct.pack("HH", wanted, wanted)
                taker.setsockopt(socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, only)
            except OSError as error:
                pytest.skip(f"this kernel does not narrow a socket's choice of ports: {error}")
            with suppress(OSError):  # the one port of its range is taken
                taker.bind((HOST, 0))
            return taker

        yield take


def test_a_port_that_the_kernel_chose_and_took_back_goes_to_a_thief(thief: Thief) -> None:
    """The test below can fail."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    assert thief(port).getsockname()[1] == port


def test_reserved_ports_are_bound_late_although_thieves_take_what_they_get(thief: Thief) -> None:
    with reserved_ports(6, HOST) as ports:
        for port in ports:
            assert thief(port).getsockname()[1] != port
        for port in ports:
            with socket.create_server((HOST, port)):
                pass


def test_they_are_in_a_row_and_none_is_one_that_the_kernel_chooses() -> None:
    with reserved_ports(10) as ports:
        assert list(ports) == list(range(ports[0], ports[0] + 10))
        assert not set(ports) & set(ephemeral_ports())


@pytest.mark.process
def test_what_one_process_has_no_other_gets() -> None:
    with ExitStack() as stack:
        blocks = [stack.enter_context(reserved_ports(40)) for _ in range(20)]
        mine = sorted({port for block in blocks for port in block})
        assert len(mine) == 800
        said = subprocess.run(
            [sys.executable, "-c", PROGRAM, *map(str, mine)], capture_output=True, text=True
        )
        assert "no 1 consecutive ports" in said.stderr


def test_a_port_that_somebody_listens_on_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpp_connectors.connector import ports

    with reserved_ports(2) as (taken, free):
        pass
    candidates = [range(taken, taken + 1), range(free, free + 1)]
    monkeypatch.setattr(ports, "_candidates", lambda count: candidates)
    for listener in ("", HOST):
        with socket.create_server((listener, taken)), reserved_ports(1) as got:
            assert list(got) == [free]


def test_an_address_of_another_host_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"), reserved_ports(1, "203.0.113.1"):
        pass
