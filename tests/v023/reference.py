"""A stand-in for vllm-ascend 0.23 on a CPU: where its NPU, kernels and worker would be.

vLLM 0.23 has no MLA for CPUs. Here it gets one in plain torch operations, with the shapes and the
order of calls of vllm-ascend: a layer keeps a tuple of tensors (latent, rotary key) in blocks of
128 tokens, which ``exec_kv_decode``, ``exec_kv_prefill`` or the fused decode function write.
Everything above that, the engine, its scheduler, planner, executor and connectors, is vLLM's own,
and the adapter is the one that serves vllm-ascend.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from kvpp_connectors.engine.ascend.adapter_v023 import Adapter023
from kvpp_connectors.engine.ascend.first_touch import hook_fused_decode
from kvpp_connectors.engine.worker import KvppWorkerMixin

__all__ = ["LATE", "KvppReferenceWorker", "ReferenceWorker", "install"]

LATE = "REFERENCE_IS_LATE"  # in the environment, a fault: a layer waits after its attention


def install() -> None:
    """Put the stand-in into this process's vLLM 0.23, before an engine is made."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.executor import multiproc_executor

    from kvpp_connectors.engine import workers
    from kvpp_connectors.launch import platforms, rules

    # Workers are forked: they have the stand-in, and pay no imports.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    path = f"{__name__}.{ReferenceBackend.__name__}"
    CpuPlatform.get_attn_backend_cls = classmethod(lambda cls, *args, **kwargs: path)
    mla_attention.get_mla_prefill_backend = lambda config: lambda **kwargs: None
    mla_attention.MLAAttention.forward = _layer_forward
    # It would take kv_b_proj apart, which oneDNN has packed; here that is called as it is.
    mla_attention.MLAAttention.process_weights_after_loading = lambda layer, dtype: None
    CPUModelRunner._reshape_kv_cache_tensors = _reshape
    platforms.KVPP_DEVICES_023 = (*platforms.KVPP_DEVICES_023, "cpu")
    workers.KVPP_WORKERS_023["cpu"] = f"{__name__}.{KvppReferenceWorker.__name__}"
    rules.OUR_WORKERS = (rules.OUR_WORKERS, __name__)  # type: ignore[assignment]


def _layer_forward(
    layer: Any, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, output_shape: Any = None
) -> torch.Tensor:
    """MLAAttention.forward in the way of vllm-ascend's ``mla_forward``."""
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, dict):
        metadata = metadata[layer.layer_name]
    output = q.new_zeros(output_shape)
    layer.impl.forward(layer.layer_name, (q, kv_c, k_pe), layer.kv_cache, metadata, False, output)
    return output


def _reshape(runner: Any, raw: dict[str, Any], kernel_block_sizes: list[int]) -> dict[str, Any]:
    """Shapes for the bytes of each layer: KVPP's tuples, or the one tensor of a stock layout."""
    found = {}
    for name, memory in raw.items():
        layer = runner.compilation_config.static_forward_context[name]
        widths = (layer.kv_lora_rank, layer.qk_rope_head_dim)
        if isinstance(memory, torch.Tensor):
            key = memory.numel() * widths[0] // sum(widths)
            memory = (memory[:key], memory[key:])
        shape = (-1, runner.cache_config.block_size, 1)
        found[name] = tuple(
            part.view(runner.kv_cache_dtype).view(*shape, width)
            for part, width in zip(memory, widths, strict=True)
        )
    return found


@dataclass
class ReferenceMetadata(AttentionMetadata):
    """Where the tokens of a batch belong. T tokens of R requests."""

    num_actual_tokens: int
    slot_mapping: torch.Tensor  # (T,)
    starts: list[int]  # R + 1 offsets into the tokens
    seq_lens: list[int]  # R: tokens of the request up to and with this batch
    block_table: torch.Tensor  # (R, blocks)
    block_size: int


class ReferenceBuilder(AttentionMetadataBuilder[ReferenceMetadata]):
    """Builds `ReferenceMetadata`."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> ReferenceMetadata:
        """Metadata of one batch."""
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        return ReferenceMetadata(
            num_actual_tokens=starts[-1],
            slot_mapping=common.slot_mapping[: starts[-1]],
            starts=starts,
            seq_lens=common.seq_lens[: common.num_reqs].tolist(),
            block_table=common.block_table_tensor,
            block_size=self.kv_cache_spec.block_size,
        )


class ReferenceBackend(AttentionBackend):
    """Names the parts to vLLM."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's log."""
        return "REFERENCE_MLA"

    @staticmethod
    def get_impl_cls() -> type[AscendMLAImpl]:
        """The attention."""
        return AscendMLAImpl

    @staticmethod
    def get_builder_cls() -> type[ReferenceBuilder]:
        """The builder of the metadata."""
        return ReferenceBuilder

    @staticmethod
    def get_kv_cache_shape(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        """Not asked: `_reshape` knows."""
        raise NotImplementedError

    @classmethod
    def is_mla(cls) -> bool:
        """The cached rows are latents."""
        return True


class DeviceOperator:
    """The fused path of decode-only batches, which is given the implementation."""

    @staticmethod
    def mla_preprocess_only_decode(
        atten_obj: Any, hidden_states: Any, kv_cache: Any, attn_metadata: ReferenceMetadata
    ) -> None:
        """Write the rows of a batch in which every request has one token."""
        _, kv_c, k_pe = hidden_states
        tokens = attn_metadata.num_actual_tokens
        _write(kv_cache, attn_metadata.slot_mapping, kv_c[:tokens], k_pe[:tokens])


def _write(kv_cache: Any, slots: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor) -> None:
    for cache, rows in zip(kv_cache, (kv_c, k_pe), strict=True):
        cache.view(-1, cache.shape[-1])[slots] = rows.reshape(len(slots), -1).to(cache.dtype)


class AscendMLAImpl(MLAAttentionImpl[ReferenceMetadata]):
    """Has the name and the methods of vllm-ascend's, so that the same hooks find them."""

    dcp_world_size = 1

    def __init__(
        self, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any
    ) -> None:
        self.num_heads = num_heads
        self.scale = scale
        self.nope, self.value = kwargs["qk_nope_head_dim"], kwargs["v_head_dim"]
        self.kv_b_proj = kwargs["kv_b_proj"]

    def forward_mha(self, *args: Any, **kwargs: Any) -> None:
        """Not used, as on Ascend."""
        raise NotImplementedError

    def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
        """Not used, as on Ascend."""
        raise NotImplementedError

    def exec_kv_decode(
        self, kv_no_split: Any, cos: Any, sin: Any, kv_cache: Any, slots: torch.Tensor
    ) -> None:
        """Write the rows of requests with one token."""
        _write(kv_cache, slots, *kv_no_split)

    def exec_kv_prefill(
        self, kv_no_split: Any, cos: Any, sin: Any, kv_cache: Any, slots: torch.Tensor
    ) -> None:
        """Write the rows of the others."""
        _write(kv_cache, slots, *kv_no_split)

    def forward(
        self,
        layer_name: str,
        hidden_states: Any,
        kv_cache: Any,
        attn_metadata: ReferenceMetadata | None,
        need_gather_q_kv: bool = False,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the batch's rows, then attend over each request's."""
        assert output is not None
        if attn_metadata is None:
            return output.fill_(0)
        self._store(hidden_states, kv_cache, attn_metadata)
        for request, length in enumerate(attn_metadata.seq_lens):
            start, stop = attn_metadata.starts[request : request + 2]
            if stop > start:
                rows = self._rows(kv_cache, attn_metadata, request, length)
                query = hidden_states[0][start:stop].view(stop - start, self.num_heads, -1)
                output[start:stop] = self._attend(query, *rows).reshape(stop - start, -1)
        return output

    def _store(self, hidden_states: Any, kv_cache: Any, batch: ReferenceMetadata) -> None:
        """By the path that vllm-ascend would take."""
        counts = torch.tensor(batch.starts).diff()
        if bool((counts == 1).all()):
            DeviceOperator.mla_preprocess_only_decode(self, hidden_states, kv_cache, batch)
            return
        single = torch.repeat_interleave(counts == 1, counts)
        _, kv_c, k_pe = (part[: batch.num_actual_tokens] for part in hidden_states)
        for chosen, write in ((single, self.exec_kv_decode), (~single, self.exec_kv_prefill)):
            if bool(chosen.any()):
                slots = batch.slot_mapping[chosen]
                write((kv_c[chosen], k_pe[chosen]), None, None, kv_cache, slots)

    def _rows(
        self, kv_cache: Any, batch: ReferenceMetadata, request: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents (L, rank) and rotary keys (L, rope) of a request's first ``length`` tokens."""
        positions = torch.arange(length)
        blocks = batch.block_table[request].to(torch.long)[positions // batch.block_size]
        slots = blocks * batch.block_size + positions % batch.block_size
        latent, rotary = (cache.view(-1, cache.shape[-1])[slots] for cache in kv_cache)
        return latent, rotary

    def _attend(
        self, query: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor
    ) -> torch.Tensor:
        """(n, heads, nope + rope) over L rows; the queries are the last n positions."""
        new, length = query.shape[0], latent.shape[0]
        both = self.kv_b_proj(latent)[0].view(length, self.num_heads, self.nope + self.value)
        key, value = both.split([self.nope, self.value], dim=-1)
        scores = torch.einsum("nhd,lhd->hnl", query[..., : self.nope], key)
        scores = scores + torch.einsum("nhd,ld->hnl", query[..., self.nope :], rotary)
        own = torch.arange(length - new, length).unsqueeze(1)
        scores = (scores * self.scale).masked_fill(torch.arange(length) > own, float("-inf"))
        return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), value)


class ReferenceWorker(CPUWorker):
    """vLLM's CPU worker: what runs where KVPP is off."""


class _ReferenceAdapter(Adapter023):
    """The adapter of vllm-ascend, with its fused decode; or one that waits too late."""

    def hook_layers(self, components: Iterable[str], acquire: Callable[[str], None]) -> None:
        if LATE in os.environ:
            self._wait_late(components, acquire)
            return
        super().hook_layers(components, acquire)
        hook_fused_decode(DeviceOperator)

    def _wait_late(self, components: Iterable[str], acquire: Callable[[str], None]) -> None:
        for component in components:
            layer, _, index = component.rpartition("[")
            impl = self.layers[layer].impl
            if index == "0]":
                impl.forward = _late(impl.forward, component, acquire)


def _late(forward: Any, component: str, acquire: Callable[[str], None]) -> Any:
    def attend_first(*arguments: Any) -> torch.Tensor:
        output: torch.Tensor = forward(*arguments)
        acquire(component)
        return output

    return attend_first


class KvppReferenceWorker(KvppWorkerMixin, ReferenceWorker):
    """KVPP over it."""

    _kvpp_adapter = _ReferenceAdapter
