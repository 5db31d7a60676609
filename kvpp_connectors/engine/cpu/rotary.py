"""The rotary self-check: does the model rotate strided inputs as a reference does?

vLLM 0.32's CPU kernel takes the stride between heads for the stride between tokens. q_pe and k_pe
are slices of wider tensors in every MLA model, so it rotates wrong values and writes over others.
"""

from __future__ import annotations

from typing import Any

import torch

from kvpp_core.errors import KvppError

__all__ = ["check_model", "check_rotary"]

_TOKENS, _HEADS, _LATENT = 5, 2, 32
_TOLERANCE = 2e-2  # absolute, for bfloat16; a wrong rotation is off by about 1


def check_model(model: torch.nn.Module) -> None:
    """Check every rotary embedding of a loaded model, each kind once.

    Raises:
        KvppError: one of them is wrong on strided inputs; the engine must not serve.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    seen: set[tuple[type, int, bool]] = set()
    for name, module in model.named_modules():
        if not isinstance(module, RotaryEmbeddingBase):
            continue
        kind = (type(module), module.rotary_dim, module.is_neox_style)
        if kind not in seen:
            seen.add(kind)
            if complaint := check_rotary(module):
                raise KvppError(
                    f"start-up check: {type(module).__name__} at {name or 'the model'} is wrong on "
                    f"strided inputs ({complaint}), so every answer would be. Remove "
                    "'+rotary_embedding' from --compilation-config.custom_ops."
                )


def check_rotary(rotary: Any) -> str | None:
    """Compare a rotary embedding on slices with its reference on dense copies.

    Returns what is wrong, or None. ``rotary`` is called as MLA attention calls it: q of shape
    (tokens, heads, rotary_dim), k of (tokens, rotary_dim) with a head dimension put in, so that its
    head stride is rotary_dim; both are slices of wider rows.
    """
    generator = torch.Generator().manual_seed(0)
    width = _LATENT + rotary.rotary_dim
    dtype = rotary.cos_sin_cache.dtype
    wide_q = torch.randn(_TOKENS, _HEADS, width, generator=generator).to(dtype)
    wide_k = torch.randn(_TOKENS, width, generator=generator).to(dtype)
    positions = torch.arange(_TOKENS)
    dense_q = wide_q[..., _LATENT:].contiguous()
    dense_k = wide_k[..., _LATENT:].unsqueeze(1).contiguous()
    expected = rotary.forward_native(positions, dense_q, dense_k)
    before = wide_q[..., :_LATENT].clone(), wide_k[..., :_LATENT].clone()
    rotated = rotary(positions, wide_q[..., _LATENT:], wide_k[..., _LATENT:].unsqueeze(1))
    for name, got, want in zip(("query", "key"), rotated, expected, strict=True):
        worst = (got.float() - want.float()).abs().max().item()
        if not worst <= _TOLERANCE:
            return f"{name} is off by {worst:.3g}"
    if not all(map(torch.equal, before, (wide_q[..., :_LATENT], wide_k[..., :_LATENT]))):
        return "values beside the slice were overwritten"
    return None
