"""`kvpp plan`: the published figures, the rules for its options, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CONFIGS, GLM, Run

Figures = Callable[..., Any]
WriteConfig = Callable[..., Path]

A5 = ("--tp", 8, "--indexer-cache", "c8-a5", "--block-size", 128)  # the specification's runs
PP2 = (*A5, "--pp", 2, "--layer-split", "38,40")


def test_single_node_ratio_is_that_of_the_formula(figures: Figures) -> None:
    found = figures(*A5)
    (stage,) = found["stages"]
    assert found["ratio"] == stage["ratio"] == 6.3374
    assert stage["bytes_per_block_off"] == 11_856_384
    assert stage["bytes_per_block_on"][0] == 1_870_848
    assert stage["binding_rank"] == 0


def test_single_node_capacity_is_that_of_the_specification(figures: Figures) -> None:
    found = figures(*A5, "--reserve", "300MiB", "--memory", "21.768GB")
    assert found["ratio"] == pytest.approx(6.2462, rel=0.005)
    assert found["tokens_off"] == pytest.approx(235_008, abs=128)  # 21.768 is rounded
    assert found["tokens_on"] == pytest.approx(1_467_904, rel=0.005)
    assert found["tokens_on"] / found["tokens_off"] == pytest.approx(6.2462, rel=0.005)


def test_two_nodes_ratios_of_the_stages(figures: Figures) -> None:
    found = figures(*PP2)
    assert [stage["ratio"] for stage in found["stages"]] == [5.1843, 5.5168]
    assert [stage["binding_rank"] for stage in found["stages"]] == [0, 0]


def test_two_nodes_capacity_is_that_of_the_specification(figures: Figures) -> None:
    found = figures(*PP2, "--reserve", "300MiB", "--memory", "26.33GB")
    assert found["tokens_off"] == 555_392
    assert found["tokens_on"] == pytest.approx(2_972_416, rel=0.005)
    assert found["ratio"] == pytest.approx(5.3519, rel=0.005)
    assert found["tokens_on"] / found["tokens_off"] == pytest.approx(5.3519, rel=0.005)


def test_the_binding_stage_switches_with_kvpp(figures: Figures) -> None:
    found = figures(*PP2)
    assert (found["binding_stage_off"], found["binding_stage_on"]) == (1, 0)


def test_deepseek_v2_lite_on_four_ranks(figures: Figures) -> None:
    found = figures("--model", CONFIGS / "deepseek-v2-lite", "--tp", 4)
    assert found["ratio"] == 3.0  # measured 3.0019: facts/kvpp_implementations.md 5.3


def test_sparse_cuda_layout_on_four_ranks(figures: Figures) -> None:
    found = figures("--tp", 4, "--indexer-cache", "fp8")
    assert found["ratio"] == 3.4912  # measured 3.4843 at TP4
    split = figures("--tp", 2, "--pcp", 2, "--indexer-cache", "fp8")
    assert split["stages"] == found["stages"]  # the group is TP x PCP


def test_ownership_by_bytes_gains_a_little(figures: Figures) -> None:
    assert figures(*A5, "--ownership", "bytes")["ratio"] == 6.3952


def test_drafts_are_whole_on_every_rank_of_the_last_stage(figures: Figures) -> None:
    without, with_draft = figures(*PP2), figures(*PP2, "--draft-layers", 1)
    assert with_draft["stages"][0] == without["stages"][0]
    extra = 147_456 + 16_384 + 512
    off, on = "bytes_per_block_off", "bytes_per_block_on"
    before, after = without["stages"][1], with_draft["stages"][1]
    assert after[off] - before[off] == extra
    assert [a - b for a, b in zip(after[on], before[on], strict=True)] == [extra] * 8
    assert figures(*A5, "--draft-layers", 1)["ratio"] == 5.9064


def test_uneven_splits_own_every_layer_once(figures: Figures) -> None:
    found = figures("--tp", 4, "--pp", 3, "--layer-split", "5,70,3")
    assert [len(stage["layers"]) for stage in found["stages"]] == [5, 70, 3]
    for stage in found["stages"]:
        assert [layer for owned in stage["owned_layers"] for layer in owned] == stage["layers"]
    assert [len(owned) for owned in found["stages"][0]["owned_layers"]] == [2, 1, 1, 1]
    assert found["stages"][2]["owned_layers"][3] == []  # a rank may own nothing


def test_default_split_is_vllms(figures: Figures) -> None:
    found = figures("--model", CONFIGS / "kimi-k2", "--tp", 2, "--pp", 4)
    assert [len(stage["layers"]) for stage in found["stages"]] == [15, 15, 16, 15]


def test_alignment_costs_blocks_but_not_many(figures: Figures) -> None:
    plain, aligned = figures(*A5), figures(*A5, "--alignment", "2MiB")
    assert plain["blocks_on"] - 16 <= aligned["blocks_on"] < plain["blocks_on"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("0.5TiB", 1 << 39),
        ("512MiB", 512 << 20),
        ("21.8GB", 21_800_000_000),
        ("21.8 gb", 21_800_000_000),
        ("20000000KB", 20_000_000_000),
        ("24000000000", 24_000_000_000),
        ("24000000000B", 24_000_000_000),
    ],
)
def test_sizes(figures: Figures, text: str, size: int) -> None:
    assert figures("--tp", 8, "--memory", text)["memory_bytes"] == size


def test_json_is_one_object_with_the_documented_keys(run: Run) -> None:
    result = run(*PP2, "--json")
    found = json.loads(result.stdout)
    assert list(found) == [
        *("model", "tp", "pcp", "pp", "block_size", "memory_bytes", "reserve_bytes"),
        *("alignment_bytes", "ownership", "scratch"),
        *("main_cache", "indexer_cache", "draft_layers"),
        *("ratio", "tokens_off", "tokens_on", "blocks_off", "blocks_on"),
        *("binding_stage_off", "binding_stage_on", "stages", "explanation"),
    ]
    assert list(found["stages"][0]) == [
        *("stage", "layers", "owned_layers", "bytes_per_block_off", "bytes_per_block_on"),
        *("blocks_off", "blocks_on", "ratio", "binding_rank"),
    ]
    assert found["model"] == str(GLM / "config.json")
    assert (found["main_cache"], found["indexer_cache"]) == ("bf16", "c8-a5")
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("options", "ratio"),
    [((), 6.3374), (("--ownership", "bytes"), 6.395), (("--scratch", "fitted"), 6.395)],
)
def test_what_each_option_buys_glm_5_2(
    figures: Figures, options: tuple[str, ...], ratio: float
) -> None:
    found = figures(*A5, "--memory", "21.768GB", *options)["ratio"]
    assert found == pytest.approx(ratio, abs=5e-4)


def test_text_and_json_agree(run: Run, figures: Figures) -> None:
    found, text = figures(*PP2), run(*PP2).stdout
    expected = [found["tokens_off"], found["tokens_on"], found["blocks_off"], found["blocks_on"]]
    for stage in found["stages"]:
        expected += [stage["bytes_per_block_off"], *stage["bytes_per_block_on"]]
        expected += [stage["blocks_off"], stage["blocks_on"]]
        assert f"ratio {stage['ratio']:.4f}" in text
        for owned in filter(None, stage["owned_layers"]):
            assert f" layers {owned[0]}-{owned[-1]} " in text
    for number in expected:
        assert f"{number:,}" in text
    assert f"{found['ratio']:.4f}" in text
    assert found["explanation"] in text
    assert "VLLM_PP_LAYER_PARTITION=38,40" in text


def test_text_marks_the_binding_rank_of_each_stage(run: Run, figures: Figures) -> None:
    args = ("--tp", 4, "--ownership", "bytes")
    (stage,) = figures(*args)["stages"]
    (line,) = [line for line in run(*args).stdout.splitlines() if "binds" in line]
    assert line.split("│")[1].strip() == str(stage["binding_rank"])
    assert f"{max(stage['bytes_per_block_on']):,}" in line


def test_the_table_is_not_cut_where_the_output_is_no_terminal(run: Run) -> None:
    result = run(*A5, "--memory", "999999TiB", "--draft-layers", 4)
    assert "…" not in result.stdout


def test_mtp_layers_that_are_not_planned_are_mentioned(run: Run) -> None:
    assert "--draft-layers 1" in run(*A5).stdout
    assert "--draft-layers" not in run(*A5, "--draft-layers", 1).stdout


def test_a_plan_that_saves_nothing_is_a_warning_not_an_error(
    run: Run, write_config: WriteConfig
) -> None:
    args = ("--model", write_config(num_hidden_layers=3), "--tp", 2)
    result = run(*args)
    assert result.exit_code == 0
    assert "warning: KVPP on holds 0.7500 times" in result.stderr
    assert "KVPP saves nothing" in result.stdout
    as_json = run(*args, "--json")
    assert json.loads(as_json.stdout)["ratio"] == 0.75
    assert "warning:" in as_json.stderr


def test_float32_configs_get_a_word_about_what_vllm_serves(
    run: Run, write_config: WriteConfig
) -> None:
    args = ("--model", write_config(dtype="float32"), "--tp", 2)
    assert "--main-cache bf16 --indexer-cache bf16" in run(*args).stderr
    assert run(*args, "--main-cache", "bf16", "--indexer-cache", "bf16").stderr == ""


def test_an_indexer_layout_without_an_indexer_is_pointed_out(run: Run) -> None:
    result = run("--model", CONFIGS / "kimi-k2", "--tp", 2, "--indexer-cache", "c8-a5")
    assert result.exit_code == 0
    assert "--indexer-cache c8-a5 has no effect" in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tp", 1), ("--tp 1", "--pcp 1", "expected 2")),
        (("--tp", 0), ("--tp '0'", "from 1")),
        (("--tp", "two"), ("--tp 'two'", "whole number")),
        (("--tp", 2.5), ("--tp '2.5'", "whole number")),
        (("--tp", 99999), ("--tp '99999'", "to 16384")),
        (("--tp", 16384, "--pcp", 2), ("--tp 16384", "--pcp 2", "32768")),
        (("--tp", 2, "--pp", 0), ("--pp '0'", "from 1")),
        (("--tp", 2, "--pcp", -1), ("--pcp '-1'", "from 1")),
        (("--tp", 2, "--pp", 79), ("--pp 79", "at most 78", "config.json")),
        (("--tp", 2, "--pp", 2, "--layer-split", "38,41"), ("'38,41'", "79", "expected 78")),
        (("--tp", 2, "--layer-split", "38,40"), ("'38,40'", "2 parts", "--pp 1")),
        (("--tp", 2, "--pp", 2, "--layer-split", "78,0"), ("'78,0'", "positive", "38,40")),
        (("--tp", 2, "--pp", 2, "--layer-split", "a,b"), ("--layer-split 'a,b'", "positive")),
        (("--tp", 2, "--memory", "24G"), ("--memory '24G'", "24GiB", "21.8GB")),
        (("--tp", 2, "--memory", "lots"), ("--memory 'lots'", "24GiB")),
        (("--tp", 2, "--memory", "0"), ("--reserve 0", "less than --memory")),
        (("--tp", 2, "--memory", "1MB"), ("--memory 1,000,000", "one block", "expected at least")),
        (("--tp", 2, "--memory", "1GB", "--reserve", "1GB"), ("--reserve 1,000,000,000", "less")),
        (("--tp", 2, "--reserve", "x"), ("--reserve 'x'", "24GiB")),
        (("--tp", 2, "--alignment", "0"), ("--alignment '0'", "at least 1")),
        (("--tp", 2, "--block-size", 0), ("--block-size '0'", "from 1")),
        (("--tp", 2, "--draft-layers", -1), ("--draft-layers '-1'", "from 0")),
        (("--tp", 2, "--main-cache", "sfa_c8"), ("--main-cache 'sfa_c8'", "mean 'sfa-c8'", "bf16")),
        (("--tp", 2, "--main-cache", "BF16"), ("--main-cache 'BF16'", "mean 'bf16'")),
        (("--tp", 2, "--indexer-cache", "c8"), ("--indexer-cache 'c8'", "mean 'c8-a", "none")),
        (("--tp", 2, "--ownership", "byte"), ("--ownership 'byte'", "mean 'bytes'")),
        (("--tp", 2, "--model", "/no/such"), ("--model /no/such", "does not exist", "config.json")),
        (("--tp", 2, "--plot", "out.pdf"), ("--plot 'out.pdf'", ".png")),
        (("--tp", 2, "--plot", "/no/such/out.png"), ("--plot", "/no/such", "folder")),
    ],
)
def test_bad_options_are_one_sentence_and_exit_code_2(
    run: Run, args: tuple[object, ...], words: tuple[str, ...]
) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("kvpp plan: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("args", [("--bogus", 1), ("--memory",)])
def test_options_that_typer_refuses_exit_with_2_too(run: Run, args: tuple[object, ...]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert str(args[0]) in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_without_mla_is_named_with_its_missing_field(
    run: Run, write_config: WriteConfig
) -> None:
    file = write_config(kv_lora_rank=None)
    result = run("--model", file, "--tp", 2)
    assert result.exit_code == 2
    for word in (str(file), "kv_lora_rank", "MLA/SFA"):
        assert word in result.stderr


def test_layouts_that_the_model_cannot_have_name_the_option(run: Run) -> None:
    result = run("--model", CONFIGS / "kimi-k2", "--tp", 2, "--main-cache", "sfa-c8")
    assert result.exit_code == 2
    assert "--main-cache sfa-c8: " in result.stderr
    assert "expected one of auto, bf16, fp16, fp32, fp8\n" in result.stderr


def test_invalid_json_is_named_with_its_place(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"num_hidden_layers": 3,}')
    result = run("--model", file, "--tp", 2)
    assert result.exit_code == 2
    assert f"{file} is not valid JSON" in result.stderr
    assert "line 1" in result.stderr


def test_help_names_every_option(run: Run) -> None:
    text = run("--help").stdout
    for option in ("--layer-split", "--memory", "--reserve", "--draft-layers", "--json", "--plot"):
        assert option in text


@pytest.mark.parametrize("extra", [(), ("--pp", 3, "--draft-layers", 1), ("--tp", 32, "--pcp", 2)])
def test_plot_writes_a_png(run: Run, tmp_path: Path, extra: tuple[object, ...]) -> None:
    file = tmp_path / "plan.png"
    result = run(*A5, *extra, "--plot", file)
    assert result.exit_code == 0, result.stderr
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > 800
    assert height > 400
    assert len(data) > 20_000


def test_plot_and_json_go_together(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    result = run(*A5, "--json", "--plot", file)
    assert json.loads(result.stdout)["ratio"] == 6.3374
    assert file.exists()


def test_plot_without_matplotlib_names_the_extra(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [*sys.modules, "matplotlib"]:
        if name.split(".")[0] == "matplotlib":
            monkeypatch.setitem(sys.modules, name, None)
    result = run(*A5, "--plot", tmp_path / "plan.png")
    assert result.exit_code == 2
    assert "pip install 'kvpp-connectors[plot]'" in result.stderr
    assert result.stdout == ""


def test_plot_of_too_many_ranks_is_an_error(run: Run, tmp_path: Path) -> None:
    result = run("--tp", 4096, "--plot", tmp_path / "plan.png")
    assert result.exit_code == 2
    assert "4096 ranks are too many" in result.stderr


def test_plot_that_cannot_be_written_is_an_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()
    result = run(*A5, "--plot", tmp_path / "taken.png")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


@pytest.mark.process
def test_planning_imports_neither_vllm_nor_torch_nor_matplotlib() -> None:
    code = (
        "import sys, kvpp_connectors.cli.model_shapes, kvpp_connectors.cli.plan\n"
        "print(sorted({'vllm', 'torch', 'matplotlib'} & set(sys.modules)))"
    )
    root = CONFIGS.parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
