"""What config.json says about the KV cache: layers, components and bytes per block."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from kvpp_connectors.cli.model_shapes import (
    INDEXER_LAYOUTS,
    MAIN_LAYOUTS,
    ModelConfigError,
    default_layer_split,
    read_model_shape,
)
from kvpp_core.errors import PlanError
from tests.cli.conftest import CONFIGS, GLM

WriteConfig = Callable[..., Path]


def test_glm_indexer_caches_sit_on_the_public_layers() -> None:
    shape = read_model_shape(GLM)
    assert sorted(shape.indexer_layers) == [0, 1, 2, *range(6, 78, 4)]
    assert (shape.layers, shape.mtp_layers, len(shape.indexer_layers)) == (78, 1, 21)


@pytest.mark.parametrize(
    ("folder", "layers", "indexers", "mtp"),
    [
        ("deepseek-v2-lite", 27, 0, 0),
        ("deepseek-v3.2", 61, 61, 1),
        ("kimi-k2", 61, 0, 0),
        ("glm-5.2", 78, 21, 1),
    ],
)
def test_example_configs(folder: str, layers: int, indexers: int, mtp: int) -> None:
    shape = read_model_shape(CONFIGS / folder)
    assert (shape.layers, len(shape.indexer_layers), shape.mtp_layers) == (layers, indexers, mtp)


@pytest.mark.parametrize(
    ("main", "indexer", "expected"),
    [
        # bytes per block of 128 tokens of layer 0: facts/kvpp_implementations.md 5.2, ascend.md 4.4
        ("bf16", "none", {"main": 147_456}),
        ("bf16", "c8-a5", {"main": 147_456, "indexer": 16_384, "indexer_scale": 512}),
        ("bf16", "c8-a2", {"main": 147_456, "indexer": 16_384, "indexer_scale": 256}),
        ("sfa-c8", "bf16", {"main": 83_968, "indexer": 32_768}),
        ("fp8_ds_mla", "fp8", {"main": 656 * 128, "indexer": 132 * 128}),
        ("fp8", "fp32", {"main": 576 * 128, "indexer": 512 * 128}),
        ("fp32", "fp16", {"main": 2304 * 128, "indexer": 256 * 128}),
        ("auto", "auto", {"main": 147_456, "indexer": 32_768}),
    ],
)
def test_bytes_per_block_of_the_layouts(main: str, indexer: str, expected: dict[str, int]) -> None:
    bundle = read_model_shape(GLM).target_bundles(main, indexer, 128)[0]
    found = {c.name: c.bytes_per_block for c in bundle.components}
    assert found == {f"model.layers.0.{part}": size for part, size in expected.items()}


def test_bytes_per_block_of_16_are_those_measured_on_cpu() -> None:
    bundle = read_model_shape(GLM).target_bundles("fp32", "fp32", 16)[0]
    assert [c.bytes_per_block for c in bundle.components] == [36_864, 8_192]  # facts/vllm_cpu.md


def test_a_layer_that_shares_its_indexer_keeps_main_only() -> None:
    bundles = read_model_shape(GLM).target_bundles("bf16", "c8-a5", 128)
    assert [c.name for c in bundles[3].components] == ["model.layers.3.main"]
    assert sum(b.bytes_per_block for b in bundles) == 11_856_384


def test_drafts_follow_the_targets_and_keep_their_own_indexer() -> None:
    drafts = read_model_shape(GLM).draft_bundles(2, "bf16", "c8-a5", 128)
    assert [draft.layer for draft in drafts] == [78, 79]
    assert [draft.bytes_per_block for draft in drafts] == [164_352, 164_352]


def test_drafts_of_a_dense_model_have_main_only() -> None:
    (draft,) = read_model_shape(CONFIGS / "kimi-k2").draft_bundles(1, "auto", "auto", 16)
    assert [c.name for c in draft.components] == ["model.layers.61.main"]


def test_pattern_goes_before_frequency_and_layers_after_it_have_an_indexer(
    write_config: WriteConfig,
) -> None:
    shape = read_model_shape(write_config(num_hidden_layers=6, index_topk_pattern="FSSF"))
    assert sorted(shape.indexer_layers) == [0, 3, 4, 5]


def test_offset_defaults_to_two(write_config: WriteConfig) -> None:
    shape = read_model_shape(write_config(num_hidden_layers=10, index_skip_topk_offset=None))
    assert sorted(shape.indexer_layers) == [0, 1, 5, 9]


def test_nested_text_config_is_read(tmp_path: Path) -> None:
    inner = json.loads((CONFIGS / "kimi-k2" / "config.json").read_text())
    dtype = inner.pop("torch_dtype")
    outer = {"model_type": "kimi_k25", "torch_dtype": dtype, "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    shape = read_model_shape(tmp_path)
    assert (shape.layers, shape.name, shape.main_layout("auto")) == (61, "kimi_k2", "bf16")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": None}, ("kv_lora_rank", "MLA/SFA")),
        ({"num_hidden_layers": None}, ("num_hidden_layers", "MLA/SFA")),
        ({"qk_rope_head_dim": None}, ("qk_rope_head_dim", "MLA/SFA")),
        ({"index_head_dim": None}, ("index_topk", "index_head_dim")),
        ({"num_hidden_layers": "many"}, ("num_hidden_layers", "'many'", "integer")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", "0", "greater")),
        ({"index_topk_pattern": "FXS"}, ("index_topk_pattern", "'FXS'", "[FS]")),
        ({"linear_attn_config": {"kda_layers": [1]}}, ("linear_attn_config", "hybrid")),
        ({"layer_types": ["full_attention", "linear_attention"]}, ("linear_attention", "hybrid")),
        ({"layer_types": [{"kind": 1}]}, ("layer_types", "hybrid")),
    ],
)
def test_unusable_models_are_refused_by_field(
    write_config: WriteConfig, changes: dict[str, object], words: tuple[str, ...]
) -> None:
    file = write_config(**changes)
    with pytest.raises(ModelConfigError) as refused:
        read_model_shape(file)
    for word in (str(file), *words):
        assert word in str(refused.value)


@pytest.mark.parametrize("text", ["{", "[1, 2]", "", "\xff\xfe"])
def test_files_that_are_no_config_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelConfigError, match=r"config\.json .*JSON"):
        read_model_shape(tmp_path)


def test_auto_needs_a_dtype_that_is_a_cache_dtype(write_config: WriteConfig) -> None:
    shape = read_model_shape(write_config(dtype="float8_e4m3fn"))
    with pytest.raises(PlanError, match="float8_e4m3fn"):
        shape.main_layout("auto")
    assert shape.main_layout("fp8_ds_mla") == "fp8_ds_mla"


def test_packed_sparse_layouts_are_refused_for_a_dense_model() -> None:
    with pytest.raises(PlanError, match=r"sparse attention only.*expected one of auto, bf16"):
        read_model_shape(CONFIGS / "kimi-k2").main_layout("sfa-c8")


def test_scaled_layouts_need_whole_tiles(write_config: WriteConfig) -> None:
    shape = read_model_shape(write_config(index_head_dim=96))
    with pytest.raises(PlanError, match="index_head_dim = 96"):
        shape.indexer_layout("c8-a5")
    assert shape.indexer_layout("bf16") == "bf16"


def test_every_layout_of_the_tables_has_a_size() -> None:
    shape = read_model_shape(GLM)
    for main in MAIN_LAYOUTS:
        for indexer in INDEXER_LAYOUTS:
            assert shape.target_bundles(main, indexer, 1)[0].bytes_per_block > 0


@pytest.mark.parametrize(
    ("layers", "stages"), [(78, 1), (78, 2), (61, 4), (27, 4), (10, 4), (5, 5)]
)
def test_default_layer_split_is_that_of_vllm(
    monkeypatch: pytest.MonkeyPatch, layers: int, stages: int
) -> None:
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    utils = import_module("vllm.distributed.utils")
    bounds = [utils.get_pp_indices(layers, stage, stages) for stage in range(stages)]
    assert default_layer_split(layers, stages) == tuple(end - start for start, end in bounds)


def test_default_layer_split_leaves_the_remainder_off_the_last_stage() -> None:
    assert default_layer_split(27, 4) == (7, 7, 7, 6)
    assert default_layer_split(61, 4) == (15, 15, 16, 15)
