"""DeepSeek-style sparse attention (SFA, DSA) for vLLM on CPU: a reference, plain and slow.

vLLM 0.32 refuses sparse models on its CPU platform. This module gives it what a DeepSeek-V3.2 or
GLM-5 model needs, in torch operations, so that KVPP's bundles of main and indexer caches run end
to end: the indexer's key cache, the top-k choice over a paged cache, and MLA over the chosen rows.
`install` puts it in place; it is called in the workers of sparse models on CPU only.

Per token t and cached position s <= t of the same request (DeepSeek-V3.2, section 2.1):

    index score(t, s) = sum over heads h of  w(t, h) * relu(q(t, h) . k(s))

The index_topk best positions of t are attended to. All tokens take vLLM's "decode" (MQA) path, so
that queries come in the latent space of the cached rows: 512 latent and 64 rotary values.

Caches hold the model's dtype, or with ``--kv-cache-dtype fp8_ds_mla`` the C8 rows of the CUDA and
Ascend backends (`kvpp_connectors.engine.cpu.sparse_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.model_executor.models import deepseek_v2
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
)
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from kvpp_connectors.engine.cpu.sparse_rows import indexer_rows, main_rows
from kvpp_connectors.log import get_logger
from kvpp_core.errors import KvppError

__all__ = ["CpuIndexer", "CpuSparseBackend", "install"]

logger = get_logger(__name__)

_MARK = "__kvpp_cpu_sfa__"


def install(compilation_mode: int) -> None:
    """Give vLLM's CPU platform sparse attention in this process. May be called repeatedly.

    ``compilation_mode`` is the engine's, as resolved. The choice of rows is passed from operation
    to operation in a buffer that a compiled graph does not know of.

    Raises:
        KvppError: the model would be compiled.
    """
    from vllm.platforms import current_platform

    if compilation_mode != 0:
        raise KvppError(
            "sparse attention on CPU runs eagerly only; use --enforce-eager, or leave "
            "VLLM_USE_BREAKABLE_CUDAGRAPH at its default"
        )
    platform = type(current_platform)
    original = platform.get_attn_backend_cls
    if getattr(original, _MARK, False):
        return

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_sparse:
            return f"{__name__}.{CpuSparseBackend.__name__}"
        path: str = original(selected_backend, attn_selector_config, num_heads)
        return path

    setattr(get_attn_backend_cls, _MARK, True)
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    deepseek_v2.Indexer = CpuIndexer
    deepseek_v2.DeepseekV32IndexerCache = CpuIndexerCache
    logger.info("CPU profile: sparse attention through the reference of this package")


@dataclass
class CpuSparseMetadata(AttentionMetadata):
    """Where the tokens of a batch belong. T tokens of R requests."""

    num_actual_tokens: int  # T
    slot_mapping: torch.Tensor  # (T,): where each token's rows are written; -1 is nowhere
    request_of_token: torch.Tensor  # (T,)
    starts: list[int]  # R + 1 offsets into the tokens
    seq_lens: list[int]  # R: tokens of the request up to and with this batch
    block_table: torch.Tensor  # (R, blocks)
    block_size: int
    # What vLLM's MLA layer asks: every token takes the MQA path.
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0

    def slots(self, request: int, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the flat cache that hold these positions of a request."""
        blocks = self.block_table[request].to(torch.long)[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size


class CpuSparseMetadataBuilder(AttentionMetadataBuilder[CpuSparseMetadata]):
    """Builds `CpuSparseMetadata` from what all backends are given."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CpuSparseMetadata:
        """Metadata of one batch; drafting goes through here too."""
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1]
        tokens = int(starts[-1])
        return CpuSparseMetadata(
            num_actual_tokens=tokens,
            slot_mapping=common.slot_mapping[:tokens],
            request_of_token=torch.repeat_interleave(starts.diff().to(torch.long)),
            starts=starts.tolist(),
            seq_lens=common.seq_lens[: common.num_reqs].tolist(),
            block_table=common.block_table_tensor,
            block_size=self.kv_cache_spec.block_size,
            num_decodes=common.num_reqs,
            num_decode_tokens=tokens,
        )


class CpuSparseBackend(AttentionBackend):
    """Names the parts to vLLM, for the main cache and the indexer's alike."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8_ds_mla"]

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's log."""
        return "KVPP_CPU_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[CpuSparseImpl]:
        """The attention over the chosen rows."""
        return CpuSparseImpl

    @staticmethod
    def get_builder_cls() -> type[CpuSparseMetadataBuilder]:
        """The builder of the metadata."""
        return CpuSparseMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        """The cached rows are latents."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """An indexer chooses the rows."""
        return True


class CpuSparseImpl(MLAAttentionImpl[CpuSparseMetadata], SharedTopkIndicesBuffer):
    """MLA over the rows that the indexer chose."""

    is_sparse = True
    supports_dense_mha_prefill = False
    can_return_lse_for_decode = False
    supports_quant_query_input = False
    dcp_world_size = 1

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        indexer: object | None = None,
        topk_indices_buffer: torch.Tensor | None = None,
        **_: Any,
    ) -> None:
        if alibi_slopes or sliding_window or logits_soft_cap or kv_sharing_target_layer_name:
            raise NotImplementedError(
                "sparse attention on CPU knows no ALiBi, sliding window, soft cap or shared cache"
            )
        self.scale = float(scale)
        self.kv_lora_rank = kv_lora_rank
        self.kv_cache_dtype = kv_cache_dtype
        self.rows = main_rows(kv_cache_dtype, kv_lora_rank)
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """vLLM calls this between indexer and attention; on CPU there is nothing to order."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write the rows of new tokens: latents (T, 512) and rotary keys (T, 1, 64)."""
        if kv_cache.numel():
            tokens = slot_mapping.numel()
            values = torch.cat((kv_c_normed[:tokens], k_pe[:tokens].squeeze(1)), dim=-1)
            self.rows.write(kv_cache, slot_mapping.flatten(), values)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CpuSparseMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Queries (T, heads, 576) over the rows chosen for each token: (T, heads, 512)."""
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        tokens = query.shape[0]
        assert self.topk_indices_buffer is not None
        width = min(self.topk_indices_buffer.shape[1], max(attn_metadata.seq_lens))
        chosen = self.topk_indices_buffer[:tokens, :width].to(torch.long)
        positions = chosen.clamp(min=0)
        slots = torch.stack(
            [
                attn_metadata.slots(int(request), positions[token])
                for token, request in enumerate(attn_metadata.request_of_token)
            ]
        )
        rows = self.rows.read(kv_c_and_k_pe_cache, slots)  # (T, width, 576) float32
        scores = torch.einsum("thd,tkd->thk", query.float(), rows) * self.scale
        scores.masked_fill_((chosen < 0).unsqueeze(1), float("-inf"))
        latents = rows[..., : self.kv_lora_rank]
        return torch.einsum("thk,tkd->thd", scores.softmax(-1), latents).to(query.dtype), None


class CpuIndexerCache(deepseek_v2.DeepseekV32IndexerCache):
    """The indexer's key cache: one row of index_head_dim values a token, in the cache's dtype."""

    def __init__(self, head_dim: int, dtype: torch.dtype, prefix: str, cache_config: Any) -> None:
        # vLLM passes the C8 row: head_dim bytes and a float32 scale for each tile.
        super().__init__(head_dim, dtype, prefix, cache_config)
        self.c8 = cache_config.cache_dtype == "fp8_ds_mla"

    def get_kv_cache_spec(self, vllm_config: Any) -> MLAAttentionSpec:
        """A cache of its own, in the same cache group as the main ones."""
        spec = super().get_kv_cache_spec(vllm_config)
        if self.c8:
            return spec
        return MLAAttentionSpec(
            block_size=spec.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=vllm_config.model_config.hf_text_config.index_head_dim,
            dtype=vllm_config.model_config.dtype,
            cache_role=SparseCacheRole.INDEXER,
        )

    def get_attn_backend(self) -> type[CpuSparseBackend]:
        """The backend of the main cache: the metadata are the same."""
        return CpuSparseBackend

    def prepare_kv_cache_update(self, attn_metadata: CpuSparseMetadata) -> None:
        """Called before the first access in a step, as for a main cache; KVPP waits here."""


class CpuIndexer(deepseek_v2.Indexer):
    """The lightning indexer: scores every cached token of a request, keeps the best."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows = indexer_rows(self.k_cache.c8)

    def forward(
        self,
        hidden_states: torch.Tensor,
        qr: torch.Tensor,
        positions: torch.Tensor,
        rotary_emb: Any,
    ) -> None:
        """Project and rotate queries (T, heads, dim), keys (T, dim), weights (T, heads); choose."""
        query = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        key, weights = self.wk_weights_proj(hidden_states)[0].split(
            [self.head_dim, self.n_head], dim=-1
        )
        key = self.k_norm(key)
        rope = self.rope_dim
        q_pe, k_pe = rotary_emb(positions, query[..., :rope], key[..., :rope].unsqueeze(1))
        query = torch.cat((q_pe.reshape(-1, self.n_head, rope), query[..., rope:]), dim=-1)
        key = torch.cat((k_pe.reshape(-1, rope), key[..., rope:]), dim=-1)
        self.choose(query, key, weights * self.softmax_scale * self.n_head_scale)

    def choose(self, query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor) -> None:
        """Write the keys to the cache, the chosen positions to the shared top-k buffer."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # a profiling or dummy run
            return
        by_layer = metadata[0] if isinstance(metadata, list) else metadata
        batch: CpuSparseMetadata = by_layer[self.k_cache.prefix]
        cache = self.k_cache.kv_cache
        self.k_cache.prepare_kv_cache_update(batch)
        self.rows.write(cache, batch.slot_mapping, key[: batch.num_actual_tokens])
        for request, length in enumerate(batch.seq_lens):
            start, stop = batch.starts[request], batch.starts[request + 1]
            if stop > start:
                keys = self.rows.read(cache, batch.slots(request, torch.arange(length)))
                best = choose_positions(
                    query[start:stop].float(), keys, weights[start:stop].float(), self.topk_tokens
                )
                buffer = self.topk_indices_buffer[start:stop]
                buffer.fill_(-1)
                buffer[:, : best.shape[1]] = best


def choose_positions(
    query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, count: int
) -> torch.Tensor:
    """The ``count`` best positions of each of the last n of L tokens; -1 where there are fewer.

    ``query`` (n, heads, dim), ``keys`` (L, dim) and ``weights`` (n, heads) are float32; the result
    is (n, min(count, L)). A token sees the positions up to its own.
    """
    new, length = query.shape[0], keys.shape[0]
    scores = torch.einsum("nh,nhl->nl", weights, (query @ keys.T).relu())
    own = torch.arange(length - new, length).unsqueeze(1)
    scores.masked_fill_(torch.arange(length) > own, float("-inf"))
    best = scores.topk(min(count, length), dim=-1)
    return best.indices.masked_fill(best.values == float("-inf"), -1)
