"""Expert parallelism on vLLM 0.32's CPU platform.

Its experts kernel takes global expert ids for the rank's own and reads past its weights. Here ids
are mapped first; an expert of another rank counts with weight 0.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from kvpp_connectors.log import get_logger

__all__ = ["install", "local_experts"]

logger = get_logger(__name__)

_MARK = "__kvpp_expert_map__"


def install() -> None:
    """Let the experts kernel heed its expert map, in this process. May be called repeatedly."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = CPUUnquantizedExperts.apply
    if getattr(original, _MARK, False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def apply(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs).arguments
        if call["expert_map"] is not None:
            call["topk_weights"], call["topk_ids"] = local_experts(
                call["topk_weights"], call["topk_ids"], call["expert_map"]
            )
        original(**call)

    setattr(apply, _MARK, True)
    CPUUnquantizedExperts.apply = apply
    logger.info("CPU profile: experts of other ranks count with weight 0")


def local_experts(
    weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and the rank's own ids of the chosen experts, both (tokens, k).

    ``expert_map`` gives for each global id the rank's own, or -1.
    """
    own = expert_map[ids.to(torch.long)]
    return weights.masked_fill(own < 0, 0), own.clamp(min=0).to(ids.dtype)
