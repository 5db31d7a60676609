"""The CPU reference of sparse attention against transformers' own models and plain loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpp_connectors.demo.oracle import Questions, oracle_logprobs
from tests.engine import tiny_models
from tests.engine.harness import (
    Request,
    Script,
    Trace,
    kvpp_off,
    random_tokens,
    start_engine,
)
from tests.engine.tiny_models import Tiny

SCRIPT = Script(
    (
        Request(random_tokens(1, 150), max_tokens=24),  # three chunks of the 64-token budget
        Request(random_tokens(2, 20), max_tokens=60),  # shorter than top-k, then longer
        Request(random_tokens(1, 150), max_tokens=12, arrives=40),  # a prefix hit
        Request(random_tokens(3, 90), max_tokens=12, arrives=41),
    )
)


def serve(folder: Path, model: Tiny) -> Trace:
    """What vLLM answers with one rank and without KVPP."""
    with start_engine(tiny_models.write(folder, model), kvpp_off(), tp=1) as engine:
        return engine.run(SCRIPT)


def assert_equals_oracle(trace: Trace, model: Path) -> None:
    """Every logprob within 1e-3 of a full recomputation by transformers."""
    expected = oracle_logprobs(
        model,
        Questions(
            prompts=[list(request.prompt) for request in SCRIPT.requests],
            answers=[answer.tokens for answer in trace.answers],
        ),
    )
    for answer, reference in zip(trace.answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(reference, abs=1e-3)


@pytest.mark.engine
@pytest.mark.parametrize("model", [tiny_models.V32, tiny_models.SFA, tiny_models.SHARED])
def test_answers_equal_transformers(tmp_path: Path, model: Tiny) -> None:
    """Prefill, decode, 64-token chunks and a prefix hit, with and without shared indexers."""
    trace = serve(tmp_path / "model", model)
    assert [answer.cached_tokens for answer in trace.answers] == [0, 0, 144, 0]
    assert any((0, 64) in step for step in trace.schedule)
    assert_equals_oracle(trace, tmp_path / "model")


@pytest.mark.engine
def test_a_top_k_as_long_as_the_context_is_dense_attention(tmp_path: Path) -> None:
    """The same weights as a DeepSeek-V3 model, which knows no indexer."""
    trace = serve(tmp_path / "sparse", replace(tiny_models.V32, topk=512))
    dense = replace(tiny_models.V32, topk=512, dense_twin=True)
    assert_equals_oracle(trace, tiny_models.write(tmp_path / "dense", dense))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_choice_equals_plain_loops(data: st.DataObject) -> None:
    """Chunks of any size at the end of a context, top-k below and above its length."""
    from kvpp_connectors.engine.cpu.sparse_mla import choose_positions

    length = data.draw(st.integers(1, 24))
    new = data.draw(st.integers(1, length))
    count = data.draw(st.integers(1, 30))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    query = torch.randn(new, 3, 8, generator=generator)
    keys = torch.randn(length, 8, generator=generator)
    weights = torch.rand(new, 3, generator=generator)
    chosen = choose_positions(query, keys, weights, count)
    assert chosen.shape == (new, min(count, length))
    for row in range(new):
        own = length - new + row
        scores = [
            sum(float(weights[row, h]) * max(0.0, float(query[row, h] @ keys[s])) for h in range(3))
            for s in range(own + 1)
        ]
        positions = [p for p in chosen[row].tolist() if p >= 0]
        assert len(positions) == len(set(positions)) == min(count, own + 1)
        worst = min(scores[p] for p in positions)
        left_out = [score for s, score in enumerate(scores) if s not in positions]
        assert all(score <= worst + 1e-5 for score in left_out)


@pytest.mark.parametrize("kind", ["main", "indexer"])
def test_c8_rows_hold_what_was_written_within_float8(kind: str) -> None:
    """656 and 132 bytes a row; rotary values keep bfloat16, tiles have scales of their own."""
    from kvpp_connectors.engine.cpu.sparse_rows import indexer_rows, main_rows

    rows, values, width = (
        (main_rows("fp8_ds_mla", 512), 576, 656)
        if kind == "main"
        else (indexer_rows(True), 128, 132)
    )
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(5, values, generator=generator)
    wanted[:, :128] *= 1000  # a tile of another size
    cache = torch.full((3, 16, width), 0xAA, dtype=torch.uint8)
    slots = torch.tensor([7, 0, -1, 47, 20])
    rows.write(cache, slots, wanted)
    kept = slots >= 0
    got = rows.read(cache, slots[kept])
    assert torch.allclose(got, wanted[kept], rtol=0.07, atol=0.05)
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slots[kept]] = False
    assert (cache.view(48, width)[untouched] == 0xAA).all()


def test_experts_of_other_ranks_count_nothing() -> None:
    """Global ids become the rank's own; the others' weights become 0."""
    from kvpp_connectors.engine.cpu.experts import local_experts

    expert_map = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.5], [0.25, 0.75]])
    ids = torch.tensor([[2, 0], [3, 2]], dtype=torch.int32)
    got, own = local_experts(weights, ids, expert_map)
    assert got.tolist() == [[0.5, 0.0], [0.25, 0.75]]
    assert own.tolist() == [[0, 0], [1, 0]] and own.dtype == torch.int32


def test_a_compiled_sparse_model_is_refused() -> None:
    """The buffer of chosen positions is invisible to a graph: wrong answers, so no start."""
    from kvpp_connectors.engine.cpu import sparse_mla as cpu_sfa
    from kvpp_core.errors import KvppError

    with pytest.raises(KvppError, match="VLLM_USE_BREAKABLE_CUDAGRAPH"):
        cpu_sfa.install(2)
