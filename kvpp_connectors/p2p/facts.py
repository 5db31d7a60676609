"""The facts of this engine that the connector works with, read from vLLM's configuration once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from kvpp_connectors.connector.facts import RankPosition
from kvpp_connectors.connector.identity import kv_cache_dtype
from kvpp_connectors.p2p.options import P2pOptions, listening_host, read_key, read_options

__all__ = ["EngineFacts", "engine_facts"]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine: its identity, its ranks, its caches' common facts."""

    engine_id: str
    produces: bool
    consumes: bool
    host: str
    kv_port: int
    options: P2pOptions
    key: bytes | None
    model: str
    block_size: int  # tokens
    kv_cache_dtype: str
    device_type: str
    dp_rank: int
    tp: int
    pp: int
    pcp: int

    @property
    def workers(self) -> int:
        """Workers of this engine."""
        return self.tp * self.pp * self.pcp

    @property
    def shares_pulls(self) -> bool:
        """Whether decode workers take parts of a pull from each other."""
        return self.options.share_pulls and self.consumes and self.tp * self.pcp > 1

    def handshake_port(self, position: RankPosition) -> int:
        """Where a worker of this engine answers; 0 where kv_port is 0: a free one."""
        if not self.kv_port:
            return 0
        return self.kv_port + self.dp_rank * self.workers + position.engine_rank


def engine_facts(vllm_config: Any) -> EngineFacts:
    """Read the facts from a VllmConfig.

    Raises:
        KvppError: the connector's own settings are wrong; names each.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    options = read_options(transfer.kv_connector_extra_config)
    return EngineFacts(
        engine_id=str(transfer.engine_id),
        produces=transfer.is_kv_producer,
        consumes=transfer.is_kv_consumer,
        host=listening_host(options),
        kv_port=transfer.kv_port,
        options=options,
        key=read_key(options),
        model=_model_identity(vllm_config.model_config, options.model_id),
        block_size=vllm_config.cache_config.block_size,
        kv_cache_dtype=kv_cache_dtype(vllm_config),
        device_type=vllm_config.device_config.device_type,
        dp_rank=parallel.data_parallel_rank,
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
    )


def _model_identity(model: Any, model_id: str | None) -> str:
    """Name and revision, and a digest of the numbers in the model's own configuration."""
    config = model.hf_text_config.to_dict().items()
    # Where it lies on this host and who read it decide no bytes.
    kept = {k: v for k, v in config if k[:1] != "_" and k != "transformers_version"}
    numbers = json.dumps(kept, sort_keys=True, default=str)
    digest = hashlib.sha256(numbers.encode()).hexdigest()[:16]
    return f"{model_id or model.model}@{model.revision or 'main'}#{digest}"
