"""The address of this process for others, and free ports of it."""

from __future__ import annotations

import socket
from contextlib import ExitStack

__all__ = ["free_ports", "own_host"]


def own_host() -> str:
    """The address that vLLM chose for this host (VLLM_HOST_IP); never all interfaces."""
    from vllm.utils.network_utils import get_ip

    found: str = get_ip()
    return "127.0.0.1" if found in ("0.0.0.0", "::") else found


def free_ports(count: int) -> list[int]:
    """As many ports on loopback that nobody listens on now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
