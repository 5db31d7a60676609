"""The rotary self-check: right embeddings pass, wrong ones are found whichever way they are wrong.

vLLM 0.32's CPU kernel uses wrong strides. Whether the installed build does is found out here by a
comparison of its own, so that the tests hold on a build in which the kernel is right as well.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvpp_connectors.engine.cpu.rotary import check_model, check_rotary
from kvpp_core.errors import KvppError

OFF, ON = "-rotary_embedding", "+rotary_embedding"
DIM, LATENT = 64, 512

Rope = Callable[..., Any]

_positions = count(1000)  # vLLM keeps one embedding per set of parameters, also for others


@pytest.fixture(scope="module")
def rope() -> Rope:
    """``rope(op, neox=False, dtype=torch.float32)``: vLLM's embedding with that custom op."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    def make(op: str, neox: bool = False, dtype: torch.dtype = torch.float32) -> Any:
        config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all", op]))
        with set_current_vllm_config(config):
            return get_rope(
                DIM,
                max_position=next(_positions),
                is_neox_style=neox,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                dtype=dtype,
            )

    return make


def kernel_is_right(rotary: Any) -> bool:
    """Whether q_pe and k_pe as an MLA layer slices them are rotated like dense copies, and the
    values beside them stay."""
    tokens, heads = 3, 4
    numbers = torch.Generator().manual_seed(1)
    q = torch.randn(tokens, heads, LATENT + DIM, generator=numbers)
    kv = torch.randn(tokens, LATENT + DIM, generator=numbers)
    beside = [tensor[..., :LATENT].clone() for tensor in (q, kv)]
    dense = [q[..., LATENT:].contiguous(), kv[:, LATENT:].unsqueeze(1).contiguous()]
    expected = rotary.forward_native(torch.arange(tokens), *dense)
    rotated = rotary(torch.arange(tokens), q[..., LATENT:], kv[:, LATENT:].unsqueeze(1))
    return all(
        torch.allclose(got, want, atol=1e-4) for got, want in zip(rotated, expected, strict=True)
    ) and all(
        torch.equal(before, after[..., :LATENT])
        for before, after in zip(beside, (q, kv), strict=True)
    )


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vllms_embedding_without_the_kernel_is_right(
    rope: Rope, neox: bool, dtype: torch.dtype
) -> None:
    """What the CPU profile runs."""
    assert check_rotary(rope(OFF, neox, dtype)) is None


@pytest.mark.parametrize("neox", [False, True])
def test_vllms_kernel_is_reported_if_it_is_wrong(rope: Rope, neox: bool) -> None:
    """On vLLM 0.32 for CPU it is wrong ("query is off by 3.63"); a build in which it is right
    must pass. Either way the self-check agrees with the comparison made here."""
    complaint = check_rotary(rope(ON, neox))
    if kernel_is_right(rope(ON, neox)):
        assert complaint is None
    else:
        assert complaint is not None
        assert complaint.startswith(("query is off by", "key is off by", "values beside"))


class Fake(SimpleNamespace):
    """An embedding that doubles its input, the way ``apply`` is written."""

    def __init__(self, apply: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        super().__init__(rotary_dim=8, cos_sin_cache=torch.zeros(1))
        self.apply = apply

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference."""
        return query * 2, key * 2

    def __call__(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model would run."""
        return self.apply(query, "query"), self.apply(key, "key")


def _new(tensor: torch.Tensor, _: str) -> torch.Tensor:
    return tensor * 2


def _in_place(tensor: torch.Tensor, _: str) -> torch.Tensor:
    return tensor.mul_(2)


def _beside(which: str) -> Callable[[torch.Tensor, str], torch.Tensor]:
    """Right values, but one write hits the element before the slice, as a wrong stride does."""

    def apply(tensor: torch.Tensor, name: str) -> torch.Tensor:
        result = tensor * 2
        if name == which:
            tensor.as_strided((1,), (1,), tensor.storage_offset() - 1).add_(1)
        return result

    return apply


def _without_strides(tensor: torch.Tensor, _: str) -> torch.Tensor:
    """In place, on the elements where a dense tensor would have them."""
    tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).mul_(2)
    return tensor


def _heads_for_tokens(which: str) -> Callable[[torch.Tensor, str], torch.Tensor]:
    """In place, with the stride between heads taken for that between tokens: vLLM's error."""

    def apply(tensor: torch.Tensor, name: str) -> torch.Tensor:
        if name != which:
            return tensor * 2
        rows = (tensor.shape[0], tensor.shape[2])
        tensor.as_strided(rows, (tensor.stride(1), 1), tensor.storage_offset()).mul_(2)
        return tensor

    return apply


def _off(which: str, by: float) -> Callable[[torch.Tensor, str], torch.Tensor]:
    return lambda tensor, name: tensor * 2 + (by if name == which else 0)


@pytest.mark.parametrize("apply", [_new, _in_place], ids=["new tensors", "in place"])
def test_a_right_embedding_passes(apply: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
    """Writing its own slice in place is what vLLM's kernels do and is no error."""
    assert check_rotary(Fake(apply)) is None


@pytest.mark.parametrize(
    ("apply", "complaint"),
    [
        (_beside("query"), "values beside the slice were overwritten"),
        (_beside("key"), "values beside the slice were overwritten"),
        (_without_strides, "query is off by"),
        (_heads_for_tokens("query"), "query is off by"),
        (_heads_for_tokens("key"), "key is off by"),
        (_off("query", 1.0), "query is off by 1"),
        (_off("key", -0.5), "key is off by 0.5"),
        (_off("key", float("nan")), "key is off by nan"),
        (_off("query", float("inf")), "query is off by inf"),
    ],
    ids=[
        "beside query",
        "beside key",
        "no strides",
        "query by heads",
        "key by heads",
        "query",
        "key",
        "nan",
        "inf",
    ],
)
def test_a_wrong_embedding_is_reported(
    apply: Callable[[torch.Tensor, str], torch.Tensor], complaint: str
) -> None:
    found = check_rotary(Fake(apply))
    assert found is not None and found.startswith(complaint)


def model_of(**embeddings: Any) -> nn.Module:
    """A model with these embeddings at ``model.<name>.rotary_emb``."""
    layers = nn.ModuleDict()
    for name, rotary in embeddings.items():
        layers[name] = nn.ModuleDict({"proj": nn.Linear(1, 1), "rotary_emb": rotary})
    return nn.ModuleDict({"model": layers})


def spoiled(rotary: Any) -> Any:
    """The embedding with a forward that is wrong on every input."""
    rotary.forward = lambda positions, query, key: (query * 0 + 7, key)
    return rotary


def test_a_model_with_right_embeddings_passes(rope: Rope) -> None:
    check_model(model_of(main=rope(OFF), indexer=rope(OFF, True)))


def test_a_model_without_embeddings_passes() -> None:
    check_model(nn.Sequential(nn.Linear(1, 1)))


def test_a_wrong_embedding_is_named_with_what_to_do(rope: Rope) -> None:
    with pytest.raises(KvppError) as caught:
        check_model(model_of(layer=spoiled(rope(OFF))))
    text = str(caught.value)
    assert "RotaryEmbedding at model.layer.rotary_emb is wrong on strided inputs" in text
    assert "query is off by" in text
    assert "Remove '+rotary_embedding' from --compilation-config.custom_ops" in text


def test_vllms_kernel_keeps_a_model_from_serving_if_it_is_wrong(rope: Rope) -> None:
    """The same as above for the installed build; see the head of this file."""
    model = model_of(layer=rope(ON))
    if kernel_is_right(rope(ON)):
        check_model(model)
    else:
        with pytest.raises(KvppError, match=r"at model\.layer\.rotary_emb is wrong"):
            check_model(model)


def test_a_wrong_embedding_behind_a_right_one_of_another_style_is_found(rope: Rope) -> None:
    """Sparse models rotate pairs in their attention and halves in their indexer, by one class
    with one dimension."""
    with pytest.raises(KvppError, match=r"model\.indexer\.rotary_emb"):
        check_model(model_of(attention=rope(OFF, False), indexer=spoiled(rope(OFF, True))))


def test_layers_that_share_an_embedding_are_checked_once(rope: Rope) -> None:
    """61 layers must not cost 61 checks."""
    calls: list[str] = []

    def counted(name: str) -> Any:
        rotary = rope(OFF)
        forward = rotary.forward

        def count_and_rotate(*inputs: torch.Tensor) -> Any:
            calls.append(name)
            return forward(*inputs)

        rotary.forward = count_and_rotate
        return rotary

    shared, twin = counted("shared"), counted("twin")
    check_model(model_of(first=shared, second=shared, third=twin))
    assert calls == ["shared"]


@pytest.mark.parametrize("use_mla", [True, False])
def test_only_models_with_mla_are_judged_by_its_slices(
    rope: Rope, monkeypatch: pytest.MonkeyPatch, use_mla: bool
) -> None:
    """The CPU profile on a model without MLA leaves vLLM's kernel on, which is right there."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    from kvpp_connectors.engine.cpu.worker import CpuProfileWorker

    monkeypatch.setattr(CPUWorker, "load_model", lambda self, load_dummy_weights: None)
    model = model_of(layer=spoiled(rope(OFF)))
    worker = CpuProfileWorker.__new__(CpuProfileWorker)
    worker.model_config = SimpleNamespace(
        use_mla=use_mla, hf_text_config=SimpleNamespace(model_type="any")
    )
    worker.parallel_config = SimpleNamespace(enable_expert_parallel=False)
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    if use_mla:
        with pytest.raises(KvppError, match="is wrong on strided inputs"):
            worker.load_model()
    else:
        worker.load_model()


def test_vllms_kernel_is_right_on_rows_of_all_heads(rope: Rope) -> None:
    """How models without MLA call it: the premise of the test above."""
    rotary, tokens, heads = rope(ON, True), 4, 3
    rows = torch.randn(tokens, 3 * heads * DIM, generator=torch.Generator().manual_seed(2))
    before = rows.clone()
    q, k, _ = rows.split(heads * DIM, dim=-1)
    want = rotary.forward_native(torch.arange(tokens), q.clone(), k.clone())
    got = rotary(torch.arange(tokens), q, k)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(rows[:, 2 * heads * DIM :], before[:, 2 * heads * DIM :])
