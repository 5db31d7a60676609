"""Tiny checkpoints of every kind that KVPP serves: MLA, SFA, shared indexers, experts, MTP.

Weights keep activations apart and the output layer is sharp, so that one wrong byte in a cache
changes answers. Two scales are special: attention and MLP outputs count 0.35 and an MTP layer
passes the token's embedding on, so that some drafts are accepted; and 32 index heads, because with
few of them relu leaves many scores at exactly 0, and a choice among equals depends on the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvpp_connectors.demo.model import write_model

__all__ = ["MLA", "SFA", "SHARED", "V32", "Tiny", "tensors", "write"]

HIDDEN, VOCABULARY, HEADS, LATENT, ROPE, NOPE, VALUE = 128, 512, 4, 512, 64, 32, 32
QUERY_RANK, INDEX_HEADS, INDEX_DIM, EXPERTS, EXPERT_SIZE, MLP_SIZE = 64, 32, 128, 8, 64, 256


@dataclass(frozen=True, slots=True)
class Tiny:
    """A kind of model. ``topk`` 0 means MLA; ``shared`` lists layers without an indexer."""

    architecture: str
    model_type: str
    topk: int = 0
    layers: int = 6
    shared: tuple[int, ...] = ()
    experts: bool = False  # mixture of experts from layer 1 on
    drafts: int = 0  # MTP layers
    dense_twin: bool = False  # the same weights, as a model that attends to everything

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer keeps an indexer cache."""
        return bool(self.topk) and layer not in self.shared

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.experts and layer >= 1

    def config(self) -> dict[str, object]:
        """The content of config.json."""
        sparse = {
            "index_topk": self.topk,
            "index_head_dim": INDEX_DIM,
            "index_n_heads": INDEX_HEADS,
            "indexer_rope_interleave": self.model_type == "glm_moe_dsa",
            "index_topk_pattern": "".join(
                "S" if layer in self.shared else "F" for layer in range(self.layers)
            ),
        }
        return {
            "architectures": ["DeepseekV3ForCausalLM" if self.dense_twin else self.architecture],
            "model_type": "deepseek_v3" if self.dense_twin else self.model_type,
            "torch_dtype": "float32",
            "num_hidden_layers": self.layers,
            "num_nextn_predict_layers": self.drafts,
            "hidden_size": HIDDEN,
            "intermediate_size": MLP_SIZE,
            "moe_intermediate_size": EXPERT_SIZE,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "vocab_size": VOCABULARY,
            "q_lora_rank": QUERY_RANK,
            "kv_lora_rank": LATENT,
            "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": NOPE,
            "v_head_dim": VALUE,
            "head_dim": ROPE,
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "first_k_dense_replace": 1 if self.experts else self.layers + self.drafts,
            "mlp_layer_types": [
                "sparse" if self.has_experts(layer) else "dense" for layer in range(self.layers)
            ],
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "rope_theta": 10000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "rope_interleave": True,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **(sparse if self.topk and not self.dense_twin else {}),
        }


MLA = Tiny("DeepseekV3ForCausalLM", "deepseek_v3")
SFA = Tiny("GlmMoeDsaForCausalLM", "glm_moe_dsa", topk=32)
SHARED = Tiny("GlmMoeDsaForCausalLM", "glm_moe_dsa", topk=32, shared=(2, 4))
V32 = Tiny("DeepseekV32ForCausalLM", "deepseek_v32", topk=32)


def write(folder: Path, model: Tiny, seed: int = 0) -> Path:
    """Write a checkpoint into ``folder``; return the folder."""
    generator = torch.Generator().manual_seed(seed)
    return write_model(folder, model.config(), dict(tensors(model, generator)))


def tensors(model: Tiny, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and weights of a checkpoint, in the order in which they are drawn."""

    def matrix(out: int, inner: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(out, inner, generator=generator).mul(scale * inner**-0.5)

    yield "model.embed_tokens.weight", matrix(VOCABULARY, HIDDEN, HIDDEN**0.5)
    yield "model.norm.weight", torch.ones(HIDDEN)
    yield "lm_head.weight", matrix(VOCABULARY, HIDDEN, 4.0)
    for layer in range(model.layers + model.drafts):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", torch.ones(HIDDEN)
        yield f"{prefix}.post_attention_layernorm.weight", torch.ones(HIDDEN)
        attention = f"{prefix}.self_attn"
        yield f"{attention}.q_a_proj.weight", matrix(QUERY_RANK, HIDDEN)
        yield f"{attention}.q_a_layernorm.weight", torch.ones(QUERY_RANK)
        yield f"{attention}.q_b_proj.weight", matrix(HEADS * (NOPE + ROPE), QUERY_RANK)
        yield f"{attention}.kv_a_proj_with_mqa.weight", matrix(LATENT + ROPE, HIDDEN)
        yield f"{attention}.kv_a_layernorm.weight", torch.ones(LATENT)
        yield f"{attention}.kv_b_proj.weight", matrix(HEADS * (NOPE + VALUE), LATENT)
        yield f"{attention}.o_proj.weight", matrix(HIDDEN, HEADS * VALUE, 0.35)
        if model.has_indexer(layer):
            indexer = f"{attention}.indexer"
            yield f"{indexer}.wq_b.weight", matrix(INDEX_HEADS * INDEX_DIM, QUERY_RANK)
            yield f"{indexer}.wk.weight", matrix(INDEX_DIM, HIDDEN)
            yield f"{indexer}.k_norm.weight", torch.ones(INDEX_DIM)
            yield f"{indexer}.k_norm.bias", torch.zeros(INDEX_DIM)
            yield f"{indexer}.weights_proj.weight", matrix(INDEX_HEADS, HIDDEN)
        if model.has_experts(layer):
            yield f"{prefix}.mlp.gate.weight", matrix(EXPERTS, HIDDEN)
            yield f"{prefix}.mlp.gate.e_score_correction_bias", torch.zeros(EXPERTS)
            names = [f"experts.{number}." for number in range(EXPERTS)] + ["shared_experts."]
            size = EXPERT_SIZE
        else:
            names, size = [""], MLP_SIZE
        for name in names:
            yield f"{prefix}.mlp.{name}gate_proj.weight", matrix(size, HIDDEN)
            yield f"{prefix}.mlp.{name}up_proj.weight", matrix(size, HIDDEN)
            yield f"{prefix}.mlp.{name}down_proj.weight", matrix(HIDDEN, size, 0.35)
        if layer >= model.layers:
            yield f"{prefix}.enorm.weight", torch.ones(HIDDEN)
            yield f"{prefix}.hnorm.weight", torch.ones(HIDDEN)
            joined = torch.cat((torch.eye(HIDDEN), matrix(HIDDEN, HIDDEN, 0.3)), dim=1)
            yield f"{prefix}.eh_proj.weight", joined
            yield f"{prefix}.shared_head.norm.weight", torch.ones(HIDDEN)
            yield f"{prefix}.shared_head.head.weight", matrix(VOCABULARY, HIDDEN, 4.0)
            yield f"{prefix}.embed_tokens.weight", matrix(VOCABULARY, HIDDEN, HIDDEN**0.5)
