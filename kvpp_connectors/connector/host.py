"""The address of this process for others."""

from __future__ import annotations

import ipaddress
import os
import socket

from kvpp_connectors.log import get_logger

__all__ = ["address_towards", "endpoint", "is_every_interface", "own_host"]

logger = get_logger(__name__)

_EVERY_INTERFACE = ("", "*", "0.0.0.0", "::")


def is_every_interface(host: str) -> bool:
    """Whether ``host`` means all interfaces of a host: no peer can connect to it."""
    return host.strip("[] ") in _EVERY_INTERFACE


def own_host() -> str:
    """The address that vLLM chose for this host, or that VLLM_HOST_IP gives it.

    Never all interfaces. Where vLLM found no address that others reach, this is the loopback
    address, and a warning says what to set.
    """
    from vllm.utils.network_utils import get_ip

    found: str = get_ip()
    host = "127.0.0.1" if is_every_interface(found) else found
    asked_for = os.environ.get("VLLM_HOST_IP") == host
    if _is_loopback(host) and not asked_for:
        logger.warning(
            "vLLM found no address of this host (%s): %s is used, which no other host reaches. Set "
            "VLLM_HOST_IP, or kv_connector_extra_config.host of MooncakeConnectorV2, to an address "
            "that the other nodes reach",
            found,
            host,
        )
    return host


def endpoint(host: str, port: int) -> str:
    """``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_towards(host: str, port: int) -> str:
    """The address of this host by which a packet would leave for another. Nothing is sent.

    Raises:
        OSError: there is no way there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
