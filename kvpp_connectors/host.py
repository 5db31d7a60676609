"""The address of this process for others."""

from __future__ import annotations

__all__ = ["own_host"]


def own_host() -> str:
    """The address that vLLM chose for this host (VLLM_HOST_IP); never all interfaces."""
    from vllm.utils.network_utils import get_ip

    found: str = get_ip()
    return "127.0.0.1" if found in ("0.0.0.0", "::") else found
