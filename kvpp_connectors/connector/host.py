"""The address of this process for others, and free ports of it."""

from __future__ import annotations

import socket
from contextlib import ExitStack

__all__ = ["address_towards", "free_ports", "own_host"]


def own_host() -> str:
    """The address that vLLM chose for this host (VLLM_HOST_IP); never all interfaces."""
    from vllm.utils.network_utils import get_ip

    found: str = get_ip()
    return "127.0.0.1" if found in ("0.0.0.0", "::") else found


def address_towards(host: str, port: int) -> str:
    """The address of this host by which a packet would leave for another. Nothing is sent.

    Raises:
        OSError: there is no way there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """As many ports of an address of this host that nobody listens on now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]
