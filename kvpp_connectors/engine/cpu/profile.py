"""The CPU profile: what vLLM 0.32's CPU platform needs to serve MLA models rightly.

1. Its rotary kernel mistakes strides and overwrites part of the latent: the op is switched off, and
   `rotary.check_model` compares what the model really runs with a reference at start-up.
2. The platform switches chunked prefill and prefix caching off for MLA and raises the token
   budget; the user's settings are put back.
3. Pipeline stages after the first lack the tensors that a warm-up run would have made
   (`kvpp_connectors.engine.cpu.worker`).
4. Sparse models are refused: a reference attention is put in
   (`kvpp_connectors.engine.cpu.sparse_mla`).
5. Its experts kernel ignores which experts a rank keeps, and crashes under expert parallelism
   (`kvpp_connectors.engine.cpu.experts`).
6. Ranks that wait spin for a second; with few cores they starve what they wait for
   (`kvpp_connectors.engine.cpu.spin`).

Each change is one log line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpp_connectors.log import get_logger

__all__ = ["ROTARY_OFF", "apply", "is_sparse"]

logger = get_logger(__name__)

ROTARY_OFF = "-rotary_embedding"
_ROTARY_ON = "+rotary_embedding"
_SPARSE_MODELS = ("deepseek_v32", "glm_moe_dsa")


def is_sparse(model_config: Any) -> bool:
    """Whether the model uses DeepSeek's sparse attention (SFA), by its model_type."""
    return getattr(model_config.hf_text_config, "model_type", None) in _SPARSE_MODELS


def apply(vllm_config: Any, platform_hook: Callable[[Any], None]) -> None:
    """Run the platform's hook and undo what it does to an MLA model's scheduling."""
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    wanted = (
        (scheduler, "enable_chunked_prefill", scheduler.enable_chunked_prefill),
        (cache, "enable_prefix_caching", cache.enable_prefix_caching),
        (scheduler, "max_num_batched_tokens", scheduler.max_num_batched_tokens),
    )
    platform_hook(vllm_config)
    model = vllm_config.model_config
    if model is None or not model.use_mla:
        return
    for owner, name, value in wanted:
        if getattr(owner, name) != value:
            logger.info("CPU profile: %s back to %s", name, value)
            setattr(owner, name, value)
    ops = vllm_config.compilation_config.custom_ops
    if ROTARY_OFF not in ops and _ROTARY_ON not in ops:
        logger.info("CPU profile: custom op rotary_embedding off; its kernel mistakes strides")
        ops.append(ROTARY_OFF)
