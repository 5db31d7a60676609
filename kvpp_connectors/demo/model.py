"""A tiny DeepSeek-V2 checkpoint whose answers depend on its KV cache.

The scale of its weights keeps activations apart and its output layer is sharp: one wrong byte in
the cache changes greedy tokens, which dummy weights would hide. vLLM and transformers load the same
folder. kv_lora_rank and qk_rope_head_dim are 512 and 64, which vLLM's CPU MLA kernel requires.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvpp_connectors.demo.prompts import VOCABULARY

__all__ = ["TinyModel", "write_checkpoint", "write_model"]


@dataclass(frozen=True, slots=True)
class TinyModel:
    """The shape of the checkpoint; names are those of Hugging Face's DeepseekV2Config."""

    num_hidden_layers: int = 6
    hidden_size: int = 128
    intermediate_size: int = 256
    num_attention_heads: int = 4
    vocab_size: int = VOCABULARY
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 32
    v_head_dim: int = 32
    max_position_embeddings: int = 2048

    def config(self) -> dict[str, object]:
        """The content of config.json."""
        return {
            **asdict(self),
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "torch_dtype": "float32",
            "hidden_act": "silu",
            "num_key_value_heads": self.num_attention_heads,
            "q_lora_rank": None,
            "head_dim": self.qk_rope_head_dim,
            "first_k_dense_replace": self.num_hidden_layers,  # no MoE layer
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }


def write_checkpoint(folder: Path, model: TinyModel | None = None, seed: int = 0) -> Path:
    """Write the checkpoint (float32) into ``folder``; return the folder."""
    model = model or TinyModel()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * scale
        for name, shape, scale in _parameters(model)
    }
    return write_model(folder, model.config(), tensors)


def write_model(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]
) -> Path:
    """Write config.json and model.safetensors into ``folder``; return the folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _parameters(model: TinyModel) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """(name, shape, standard deviation) of every parameter; one-dimensional ones are norms: 1.0."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    query = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    matrices = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.kv_a_proj_with_mqa": (model.kv_lora_rank + model.qk_rope_head_dim, hidden),
        "self_attn.kv_b_proj": (
            heads * (model.qk_nope_head_dim + model.v_head_dim),
            model.kv_lora_rank,
        ),
        "self_attn.o_proj": (hidden, heads * model.v_head_dim),
        "mlp.gate_proj": (model.intermediate_size, hidden),
        "mlp.up_proj": (model.intermediate_size, hidden),
        "mlp.down_proj": (hidden, model.intermediate_size),
    }
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "self_attn.kv_a_layernorm": model.kv_lora_rank,
    }
    yield "model.embed_tokens.weight", (model.vocab_size, hidden), 1.0
    for layer in range(model.num_hidden_layers):
        for name, shape in matrices.items():
            yield f"model.layers.{layer}.{name}.weight", shape, shape[1] ** -0.5
        for name, size in norms.items():
            yield f"model.layers.{layer}.{name}.weight", (size,), 1.0
    yield "model.norm.weight", (hidden,), 1.0
    yield "lm_head.weight", (model.vocab_size, hidden), 4.0 * hidden**-0.5
