"""The address of this process for others."""

from __future__ import annotations

import socket

__all__ = ["address_towards", "own_host"]


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
