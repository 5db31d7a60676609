"""MultiConnector for children of ours: vLLM's own wrapper, and what it leaves out.

vLLM's hands on the start-up handshake of its first child alone, and knows connectors by their
registered names, which other plug-ins may have taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector as VllmMultiConnector,
)

from kvpp_connectors.p2p.connector import MooncakeConnectorV2
from kvpp_connectors.pool.connector import AscendStoreConnector

__all__ = ["MultiConnector"]

_OURS = {kind.__name__: kind for kind in (MooncakeConnectorV2, AscendStoreConnector)}


@dataclass(frozen=True, slots=True)
class _Handshakes(KVConnectorHandshakeMetadata):
    """One worker's handshakes, by child; None of a child that has nothing to say."""

    of_children: tuple[KVConnectorHandshakeMetadata | None, ...]


class MultiConnector(VllmMultiConnector):
    """Children load in their order and save each; every child gets its own handshakes."""

    def get_handshake_metadata(self) -> _Handshakes | None:
        """What this worker's children tell their scheduler halves."""
        found = tuple(child.get_handshake_metadata() for child in self._connectors)
        return _Handshakes(found) if any(one is not None for one in found) else None

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """Every child gets what its own workers said."""
        for index, child in enumerate(self._connectors):
            said = {ranks: found.of_children[index] for ranks, found in metadata.items()}
            if any(one is not None for one in said.values()):
                child.set_xfer_handshake_metadata_pp_aware(said)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Stats that came as plain data from another process, by class name of the child."""
        rebuilt = {
            name: _OURS[name].build_kv_connector_stats(data=found)
            if name in _OURS and not isinstance(found, KVConnectorStats)
            else found
            for name, found in (data or {}).items()
        }
        stats: KVConnectorStats | None = super().build_kv_connector_stats(rebuilt)
        return stats
