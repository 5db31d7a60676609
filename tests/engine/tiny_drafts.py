"""A tiny Eagle3 draft for the tiny models: one layer with MLA.

An Eagle3 layer reads the last token's embedding beside three hidden states of the target. These
weights let attention find the token itself and pass its embedding on, with the target's own output
layer: some drafts are accepted, and fewer when the draft's cache is damaged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from kvpp_connectors.demo.model import write_model
from tests.engine.tiny_models import (
    HEADS,
    HIDDEN,
    LATENT,
    MLA,
    MLP_SIZE,
    NOPE,
    QUERY_RANK,
    ROPE,
    VALUE,
    VOCABULARY,
    Tiny,
    tensors,
)

__all__ = ["write_eagle3"]


def write_eagle3(folder: Path, target: Tiny, seed: int = 7) -> Path:
    """Write a draft for ``target`` into ``folder``; return the folder."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(_around(target, generator)) | dict(_attention(generator))
    return write_model(folder, _config(), weights)


def _config() -> dict[str, object]:
    return replace(MLA, layers=1).config() | {
        # vLLM takes every draft of type deepseek_v3 for an MTP layer.
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "draft_vocab_size": VOCABULARY,
        # By default these are layers 2, L / 2 and L - 3, of which two are one in a tiny target.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
    }


def _around(target: Tiny, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything but the attention."""
    own = dict(tensors(target, torch.Generator().manual_seed(0)))
    yield "lm_head.weight", own["lm_head.weight"]
    yield "norm.weight", torch.ones(HIDDEN)
    yield "fc.weight", _matrix(generator, HIDDEN, 3 * HIDDEN, 0.1)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        yield f"midlayer.{name}.weight", torch.ones(HIDDEN)
    for name in ("gate_proj", "up_proj"):
        yield f"midlayer.mlp.{name}.weight", _matrix(generator, MLP_SIZE, HIDDEN)
    yield "midlayer.mlp.down_proj.weight", _matrix(generator, HIDDEN, MLP_SIZE, 0.1)


def _attention(generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Latents are the embedding; keys and queries are the same small projection of it."""
    prefix = "midlayer.self_attn"
    look = _matrix(generator, QUERY_RANK, HIDDEN)
    yield f"{prefix}.q_a_proj.weight", torch.cat((look, torch.zeros(QUERY_RANK, HIDDEN)), dim=1)
    yield f"{prefix}.q_a_layernorm.weight", torch.ones(QUERY_RANK)
    heads = [_matrix(generator, NOPE, QUERY_RANK, 2.0) for _ in range(HEADS)]
    rope = torch.zeros(ROPE, QUERY_RANK)
    yield f"{prefix}.q_b_proj.weight", torch.cat([part for h in heads for part in (h, rope)])
    latent = torch.zeros(LATENT + ROPE, 2 * HIDDEN)
    latent[:HIDDEN, :HIDDEN] = torch.eye(HIDDEN)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", latent
    # Three quarters of the latent are zero: its norm would double the embedding.
    yield f"{prefix}.kv_a_layernorm.weight", torch.full((LATENT,), math.sqrt(HIDDEN / LATENT))
    values = torch.eye(HIDDEN).split(VALUE)
    rows = [torch.cat((h @ look, v)) for h, v in zip(heads, values, strict=True)]
    wide = torch.cat(rows)
    unused = torch.zeros(len(wide), LATENT - HIDDEN)
    yield f"{prefix}.kv_b_proj.weight", torch.cat((wide, unused), dim=1)
    yield f"{prefix}.o_proj.weight", torch.eye(HIDDEN) * math.sqrt(HIDDEN)


def _matrix(generator: torch.Generator, out: int, inner: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(out, inner, generator=generator).mul(scale * inner**-0.5)
