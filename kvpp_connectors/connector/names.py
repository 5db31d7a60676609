"""The names that launch lines use for what this package brings."""

from __future__ import annotations

__all__ = ["CONNECTOR_MODULES", "MULTI", "MULTI_MODULE", "OPTIONS", "P2P", "POOL", "SWITCH"]

SWITCH = "enable_kvpp"  # keys of --additional-config
OPTIONS = "kvpp"
P2P, POOL, MULTI = "MooncakeConnectorV2", "AscendStoreConnector", "MultiConnector"
CONNECTOR_MODULES = {
    P2P: "kvpp_connectors.p2p.connector",
    POOL: "kvpp_connectors.pool.connector",
}
MULTI_MODULE = "kvpp_connectors.multi.connector"  # of our MultiConnector
