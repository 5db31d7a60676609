"""Where vLLM finds the connectors that this package brings. Nothing heavy is imported here."""

from __future__ import annotations

from kvpp_connectors.connector.names import P2P, POOL

__all__ = ["CONNECTOR_MODULES", "MULTI_MODULE"]

CONNECTOR_MODULES = {
    P2P: "kvpp_connectors.p2p.connector",
    POOL: "kvpp_connectors.pool.connector",
}
MULTI_MODULE = "kvpp_connectors.multi.connector"  # of our MultiConnector
