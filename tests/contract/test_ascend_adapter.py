"""The adapter of vllm-ascend 0.23 on stand-ins: bytes of every cache layout, and where layers wait.

The classes here have the names and attributes of vllm-ascend's, which test_ascend_wheels.py checks
in its wheel; `make test-vllm023` runs the adapter in real engines.
"""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpp_connectors.connector.caches import single_tensors
from kvpp_connectors.connector.process import published
from kvpp_connectors.connector.transfer_engine import TransferEngine
from kvpp_connectors.engine.ascend.caches import (
    ALIGNMENT,
    aligned_buffer,
    components_of,
    raw_tensors,
)
from kvpp_connectors.engine.ascend.first_touch import hook_fused_decode, hook_implementation
from kvpp_connectors.vllm_api.names_ascend023 import FIRST_TOUCH, ONLY_DECODE
from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.errors import KvppError, PlanError
from kvpp_core.layout import Placement, build_layout

NAME = "model.layers.3.self_attn.attn"
LATENT, ROTARY, INDEX, PACKED = 512, 64, 128, 656


def spec(page_size_bytes: int, **changes: Any) -> SimpleNamespace:
    """As much of an AscendMLAAttentionSpec as is read."""
    fields: dict[str, Any] = {
        "block_size": 128,
        "num_kv_heads": 1,
        "head_size": LATENT + ROTARY,
        "dtype": torch.bfloat16,
        "sparse_head_dim": None,
        "cache_sparse_sfa_c8": False,
        "cache_sparse_li_c8": False,
        "c8_k_cache_dtype": torch.int8,
        "c8_k_scale_cache_dtype": torch.float16,
        "sfa_dcp_replicated_indexer_size": 1,
    }
    return SimpleNamespace(page_size_bytes=page_size_bytes, **(fields | changes))


SFA, BARE = (LATENT, ROTARY, INDEX), (LATENT, ROTARY, 0)
C8, BARE_C8 = (PACKED, 0, INDEX), (PACKED, 0, 0)
LAYOUTS = {  # the specification, and the bytes of one token in each tensor
    "MLA": (spec(147_456), [1024, 128]),
    "SFA": (spec(180_224, sparse_head_dim=SFA), [1024, 128, 256]),
    "SFA without an indexer": (spec(147_456, sparse_head_dim=BARE), [1024, 128]),
    "LI-C8": (
        spec(164_096, sparse_head_dim=SFA, cache_sparse_li_c8=True),
        [1024, 128, 128, 2],
    ),
    "SFA-C8": (spec(116_736, sparse_head_dim=C8, cache_sparse_sfa_c8=True), [656, 256]),
    "SFA-C8 and LI-C8": (
        spec(100_608, sparse_head_dim=C8, cache_sparse_sfa_c8=True, cache_sparse_li_c8=True),
        [656, 128, 2],
    ),
    "SFA-C8 without an indexer": (
        spec(83_968, sparse_head_dim=BARE_C8, cache_sparse_sfa_c8=True),
        [656],
    ),
    "LI-C8 on A5": (
        spec(
            164_352,
            sparse_head_dim=SFA,
            cache_sparse_li_c8=True,
            c8_k_cache_dtype=torch.float8_e4m3fn,
            c8_k_scale_cache_dtype=torch.float32,
        ),
        [1024, 128, 128, 4],
    ),
}
LAYER = SimpleNamespace(kv_lora_rank=LATENT, qk_rope_head_dim=ROTARY)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layers_tensors_are_counted_to_the_byte(name: str) -> None:
    """In the order of vllm-ascend's tuple; block_size 128."""
    given, per_token = LAYOUTS[name]
    found = components_of(NAME, given, LAYER)
    assert found == tuple(Component(f"{NAME}[{i}]", 128 * size) for i, size in enumerate(per_token))


def test_a_draft_with_heads_of_its_own_keeps_key_and_value() -> None:
    draft = SimpleNamespace(
        block_size=128, num_kv_heads=4, head_size=64, head_size_v=32, dtype=torch.bfloat16
    )
    draft.page_size_bytes = 128 * 4 * (64 + 32) * 2
    sizes = [c.bytes_per_block for c in components_of(NAME, draft, SimpleNamespace())]
    assert sizes == [128 * 4 * 64 * 2, 128 * 4 * 32 * 2]


def test_a_layout_that_does_not_add_up_is_refused_with_its_figures() -> None:
    """For one, the quantized keys of fa_quant."""
    with pytest.raises(PlanError, match=r"takes 81,920 bytes per block, and its parts 131,072 \+"):
        components_of(NAME, spec(81_920), LAYER)


def test_bundles_are_aligned_and_their_components_follow_one_another() -> None:
    """Of a rank that owns the second of two layers; the first lies in a scratch slot."""
    given, _ = LAYOUTS["SFA-C8 and LI-C8"]
    bundles = tuple(
        LayerBundle(layer, components_of(f"layers.{layer}.attn", given, LAYER)) for layer in (0, 1)
    )
    placement = Placement(bundles, owners=(0, 1), ranks=2, rank=1, alignment=ALIGNMENT)
    layout = build_layout(placement, num_blocks=5)
    buffer = aligned_buffer(layout.size, torch.device("cpu"))
    assert buffer.numel() == layout.size
    assert buffer.untyped_storage().nbytes() == layout.size + ALIGNMENT
    tensors = raw_tensors(buffer, layout)
    assert set(tensors) == {"layers.0.attn", "layers.1.attn"}
    for parts in tensors.values():
        assert [part.numel() for part in parts] == [5 * 128 * size for size in (656, 128, 2)]
        assert parts[0].data_ptr() % ALIGNMENT == 0
        for before, after in itertools.pairwise(parts):
            assert before.data_ptr() + before.numel() == after.data_ptr()
    first, second = (tensors[f"layers.{layer}.attn"][0].data_ptr() for layer in (0, 1))
    assert first < second


def test_connectors_give_every_tensor_of_a_tuple_the_name_of_its_component() -> None:
    caches = {"a": torch.zeros(1), "b": (torch.zeros(2), torch.zeros(3))}
    assert {name: t.numel() for name, t in single_tensors(caches).items()} == {
        "a": 1,
        "b[0]": 2,
        "b[1]": 3,
    }


@pytest.mark.parametrize("given", [{"enable_kvpp": True}, {"enable_kvpp": False}, {}, object()])
def test_our_connectors_refuse_a_kvpp_that_is_not_ours(given: object) -> None:
    """No worker of ours has laid anything out in this process."""
    config = SimpleNamespace(additional_config=given)
    if given == {"enable_kvpp": True}:
        with pytest.raises(KvppError, match="is not that of kvpp-connectors"):
            published(config)
    else:
        assert published(config).layout is None


class Registering:
    """As much of Mooncake's engine as registers memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def register_memory(self, start: int, size: int) -> int:
        """Note the call."""
        self.calls.append((start, size))
        return 0


@pytest.mark.parametrize("protocol", ["ascend", "tcp"])
def test_what_npus_register_starts_at_2_mib(protocol: str) -> None:
    """The whole buffer is in it, once; other transports take the storage as it is."""
    engine = TransferEngine.__new__(TransferEngine)
    raw = Registering()
    engine._engine, engine.protocol, engine._registered = raw, protocol, {}
    engine._registering = threading.Lock()
    buffer = aligned_buffer(3 * ALIGNMENT, torch.device("cpu"))
    storage = buffer.untyped_storage()
    for _ in range(2):
        engine.register(storage.data_ptr(), storage.nbytes())
    # As a pool beside P/D does, of the same engine: Mooncake takes no byte twice.
    engine.register(storage.data_ptr(), storage.nbytes())
    engine.register(storage.data_ptr() + ALIGNMENT, ALIGNMENT)
    ((start, size),) = raw.calls
    assert start + size == storage.data_ptr() + storage.nbytes()
    assert start == (buffer.data_ptr() if protocol == "ascend" else storage.data_ptr())


class AscendMLAImpl:
    """Has the name and the methods of vllm-ascend's; ``path`` is the one its forward takes."""

    def __init__(self, order: list[str], path: str) -> None:
        self.order = order
        self.path = path

    def exec_kv_decode(self, kv_cache: object) -> None:
        """Write."""
        self.order.append("written")

    def exec_kv_prefill(self, kv_cache: object) -> None:
        """Write."""
        self.order.append("written")

    def forward(
        self, layer_name: str, hidden_states: object, kv_cache: object, attn_metadata: object
    ) -> str:
        """Project, then write, then read."""
        if attn_metadata is None:
            return "profiled"
        self.order.append("projected")
        if self.path == ONLY_DECODE:
            Adaptor.mla_preprocess_only_decode(self, kv_cache)
        elif self.path:
            getattr(self, self.path)(kv_cache)
        return "answered"


class Unknown(AscendMLAImpl):
    """A class of attention that nobody has looked at."""


class Adaptor:
    """Has the function of the fused path."""

    @staticmethod
    def mla_preprocess_only_decode(atten_obj: Any, kv_cache: object) -> None:
        """Write."""
        atten_obj.order.append("written")


def hooked(kind: type[AscendMLAImpl], path: str) -> tuple[AscendMLAImpl, list[str]]:
    """An implementation with hooks, and what happened in order."""
    order: list[str] = []
    impl = kind(order, path)
    hook_implementation("layer 3", impl, lambda name: order.append(f"waited for {name}"))
    hook_fused_decode(Adaptor)
    hook_fused_decode(Adaptor)
    return impl, order


@pytest.mark.parametrize("path", [*FIRST_TOUCH["AscendMLAImpl"], ONLY_DECODE])
def test_a_layer_waits_after_its_projections_and_before_its_first_write(path: str) -> None:
    """In every step once, on each of the paths."""
    impl, order = hooked(AscendMLAImpl, path)
    for _ in range(2):
        assert impl.forward("layer 3", None, None, object()) == "answered"
    assert order == ["projected", "waited for layer 3", "written"] * 2


def test_profiling_waits_for_nothing() -> None:
    impl, order = hooked(AscendMLAImpl, "exec_kv_prefill")
    assert impl.forward("layer 3", None, None, None) == "profiled"
    assert order == []


def test_an_unknown_implementation_waits_before_its_forward() -> None:
    impl, order = hooked(Unknown, "exec_kv_prefill")
    impl.forward("layer 3", None, None, object())
    assert order == ["waited for layer 3", "projected", "written"]


def test_a_forward_that_takes_none_of_the_known_paths_fails_by_name() -> None:
    impl, _ = hooked(AscendMLAImpl, "")
    with pytest.raises(KvppError, match=r"AscendMLAImpl\.forward ran without exec_kv_decode"):
        impl.forward("layer 3", None, None, object())


def test_a_method_that_is_gone_fails_at_start_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(AscendMLAImpl, "exec_kv_prefill")
    with pytest.raises(KvppError, match=r"AscendMLAImpl\.exec_kv_prefill is missing"):
        hooked(AscendMLAImpl, "exec_kv_decode")


def test_a_draft_takes_the_fused_path_without_waiting() -> None:
    """Its implementation has no hooks; the function is everybody's."""
    hook_fused_decode(Adaptor)
    order: list[str] = []
    Adaptor.mla_preprocess_only_decode(AscendMLAImpl(order, ""), None)
    assert order == ["written"]
