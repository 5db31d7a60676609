"""The facts of this engine that the connector works with, read from vLLM's configuration once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvpp_connectors.connector.facts import EngineFacts, RankPosition, engine_facts
from kvpp_connectors.connector.identity import model_identity
from kvpp_connectors.p2p.options import P2pOptions, listening_host, read_key, read_options

__all__ = ["P2pFacts", "p2p_facts"]


@dataclass(frozen=True, slots=True)
class P2pFacts:
    """One engine as a side of transfers: who it is, what it may do, where it listens."""

    engine: EngineFacts
    engine_id: str
    produces: bool
    consumes: bool
    host: str
    kv_port: int
    options: P2pOptions
    key: bytes | None = field(repr=False)
    model: str  # its ModelIdentity, as it is sent

    @property
    def shares_pulls(self) -> bool:
        """Whether decode workers take parts of a pull from each other."""
        return self.options.share_pulls and self.consumes and self.engine.tp * self.engine.pcp > 1

    def handshake_port(self, position: RankPosition) -> int:
        """Where a worker of this engine answers; 0 where kv_port is 0: a free one."""
        if not self.kv_port:
            return 0
        return self.kv_port + self.engine.dp_rank * self.engine.workers + position.engine_rank


def p2p_facts(vllm_config: Any) -> P2pFacts:
    """Read the facts from a VllmConfig.

    Raises:
        KvppError: the connector's own options are wrong; names each. Or a number of the model's
            configuration differs by process.
    """
    transfer = vllm_config.kv_transfer_config
    options = read_options(transfer.kv_connector_extra_config)
    return P2pFacts(
        engine=engine_facts(vllm_config),
        engine_id=str(transfer.engine_id),
        produces=transfer.is_kv_producer,
        consumes=transfer.is_kv_consumer,
        host=listening_host(options),
        kv_port=transfer.kv_port,
        options=options,
        key=read_key(options),
        model=str(model_identity(vllm_config, options.model_id)),
    )
