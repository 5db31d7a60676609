"""The names that launch lines use for what this package brings."""

from __future__ import annotations

__all__ = ["MULTI", "OPTIONS", "OURS", "P2P", "POOL", "SWITCH"]

SWITCH = "enable_kvpp"  # keys of --additional-config
OPTIONS = "kvpp"
P2P, POOL, MULTI = "MooncakeConnectorV2", "AscendStoreConnector", "MultiConnector"
OURS = (P2P, POOL)  # MULTI is vLLM's name, too
