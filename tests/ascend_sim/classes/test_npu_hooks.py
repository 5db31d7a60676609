"""KVPP's hooks on vllm-ascend's real attention classes wait before the first access to the cache.

The methods run as they are; only the operators that write the cache, which need an NPU's kernels,
note that they were called.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm_ascend.attention import mla_v1, sfa_v1
from vllm_ascend.device import device_op

from kvpp_connectors.engine.ascend.first_touch import hook_fused_decode, hook_implementation
from kvpp_connectors.vllm_api.names_ascend023 import FIRST_TOUCH, ONLY_DECODE

NAME = "model.layers.0.self_attn.attn"
LATENT, ROTARY, TOKENS = 512, 64, 3
WAITED = f"waited for {NAME}"


class WatchedCache(tuple[torch.Tensor, ...]):
    """A layer's cache that notes who takes a tensor of it."""

    events: list[str]

    def __getitem__(self, index: Any) -> Any:
        self.events.append("cache")
        return super().__getitem__(index)


def _cache(events: list[str]) -> WatchedCache:
    cache = WatchedCache(torch.zeros(4, 128, 1, width) for width in (LATENT, ROTARY))
    cache.events = events
    return cache


def _implementation(kind: type, events: list[str], *, hooked: bool) -> Any:
    """A real implementation with as many attributes as its methods read here."""
    impl: Any = object.__new__(kind)
    vars(impl).update(
        num_kv_heads=1,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROTARY,
        kv_a_layernorm=SimpleNamespace(weight=torch.ones(LATENT), variance_epsilon=1e-6),
        enable_kv_nz=False,
        fa_quant_layer=False,
        enable_sparse_sfa_c8=False,
        enable_dsa_cp=False,
        has_indexer=True,
    )
    if hooked:
        hook_implementation(NAME, impl, lambda name: events.append(f"waited for {name}"))
    return impl


def _operators(events: list[str]) -> SimpleNamespace:
    def write(*_: Any, **__: Any) -> tuple[None, ...]:
        events.append("write")
        return (None,) * 4

    return SimpleNamespace(npu_kv_rmsnorm_rope_cache=write)


def _written_by(module: Any, kind: type, method: str, *, hooked: bool) -> list[str]:
    events: list[str] = []
    impl = _implementation(kind, events, hooked=hooked)
    rows = torch.zeros(TOKENS, LATENT + ROTARY)
    arguments: list[Any] = [rows, None, None, _cache(events), torch.arange(TOKENS)]
    if kind is sfa_v1.AscendSFAImpl:
        arguments.append(None)  # metadata
    with mock.patch.object(module, "torch_npu", _operators(events)):
        getattr(impl, method)(*arguments)
    return events


CASES = [
    (mla_v1, mla_v1.AscendMLAImpl, "exec_kv_decode"),
    (mla_v1, mla_v1.AscendMLAImpl, "exec_kv_prefill"),
    (sfa_v1, sfa_v1.AscendSFAImpl, "exec_kv"),
]


@pytest.mark.parametrize(("module", "kind", "method"), CASES)
def test_npu_layer_is_waited_for_before_its_cache_is_touched(
    module: Any, kind: type, method: str
) -> None:
    assert _written_by(module, kind, method, hooked=True) == [WAITED, "cache", "cache", "write"]
    assert _written_by(module, kind, method, hooked=False) == ["cache", "cache", "write"]


@pytest.mark.parametrize("kind", [mla_v1.AscendMLAImpl, sfa_v1.AscendSFAImpl])
def test_npu_hooks_cover_every_method_that_is_listed(kind: type) -> None:
    impl = _implementation(kind, [], hooked=True)
    for method in (*FIRST_TOUCH[kind.__name__], "forward"):
        assert method in vars(impl)
        assert vars(impl)[method].__wrapped__.__func__ is getattr(kind, method)


@pytest.mark.parametrize("method", FIRST_TOUCH["AscendSFAImpl"][1:])
def test_npu_fused_preprocessing_waits_before_anything_else(method: str) -> None:
    """They run into the first operator; by then the layer has been waited for."""
    events: list[str] = []
    impl = _implementation(sfa_v1.AscendSFAImpl, events, hooked=True)
    call: Callable[..., Any] = getattr(impl, method)
    taken = call.__wrapped__.__code__.co_argcount - 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        call(*[_cache(events) for _ in range(taken)])
    assert events[0] == WAITED


def test_npu_fused_decode_waits_before_it_takes_the_cache() -> None:
    events: list[str] = []
    impl = _implementation(mla_v1.AscendMLAImpl, events, hooked=True)
    adaptor = type("Adaptor", (device_op.DeviceOperator,), {})
    hook_fused_decode(adaptor)
    metadata = mock.MagicMock(num_decode_tokens=TOKENS)
    with pytest.raises(AttributeError):  # at the first weight, which this layer has not
        getattr(adaptor, ONLY_DECODE)(impl, torch.zeros(TOKENS, 8), _cache(events), metadata)
    assert events == [WAITED, "cache", "cache"]
