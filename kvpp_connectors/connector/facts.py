"""What every connector reads of its engine, and where its worker stands in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvpp_connectors.connector.identity import kv_cache_dtype

__all__ = ["EngineFacts", "RankPosition", "engine_facts", "local_device", "rank_position"]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine: its parallel axes, and what holds of all its caches."""

    device_type: str
    block_size: int  # tokens
    kv_cache_dtype: str  # by value: never "auto"
    tp: int
    pp: int
    pcp: int
    dp_rank: int

    @property
    def workers(self) -> int:
        """Workers of this engine."""
        return self.tp * self.pp * self.pcp


def engine_facts(vllm_config: Any) -> EngineFacts:
    """Read the facts from a VllmConfig."""
    parallel = vllm_config.parallel_config
    return EngineFacts(
        device_type=vllm_config.device_config.device_type,
        block_size=vllm_config.cache_config.block_size,
        kv_cache_dtype=kv_cache_dtype(vllm_config),
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        dp_rank=parallel.data_parallel_rank,
    )


@dataclass(frozen=True, slots=True)
class RankPosition:
    """A worker's rank along each parallel axis of its engine, and the sizes of the inner axes.

    vLLM numbers the workers of an engine as (pp, pcp, tp), with tp fastest.
    """

    pp: int = 0
    pcp: int = 0
    tp: int = 0
    pcp_size: int = 1
    tp_size: int = 1

    @property
    def group_size(self) -> int:
        """Workers of this pipeline stage: its TP x PCP ranks."""
        return self.pcp_size * self.tp_size

    @property
    def group_rank(self) -> int:
        """Rank among the workers of this pipeline stage."""
        return self.pcp * self.tp_size + self.tp

    @property
    def engine_rank(self) -> int:
        """Rank among all workers of the engine."""
        return self.pp * self.group_size + self.group_rank


def rank_position() -> RankPosition:
    """The position of this process, from vLLM's parallel groups."""
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    pcp, tp = get_pcp_group(), get_tp_group()
    return RankPosition(
        pp=get_pp_group().rank_in_group,
        pcp=pcp.rank_in_group,
        tp=tp.rank_in_group,
        pcp_size=pcp.world_size,
        tp_size=tp.world_size,
    )


def local_device(device_type: str) -> torch.device:
    """The device of this worker. To be called from the thread that runs the model: vLLM makes the
    device current there before it makes connectors.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())
