"""What makes two engines' models one, for both connectors.

Field report 1.2: two equal engines refuse each other, two unlike ones do not.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpp_connectors.connector.identity import ModelIdentity, kv_cache_dtype, model_identity
from kvpp_connectors.demo.model import TinyModel, write_checkpoint
from kvpp_connectors.p2p.protocol import Description
from kvpp_connectors.p2p.read_plan import Incompatible, choose_sources

NUMBERS = {"num_hidden_layers": 5, "kv_lora_rank": 512, "rope_parameters": {"factor": 40.0}}
SMALL = TinyModel(num_hidden_layers=1, hidden_size=16, intermediate_size=16)


def model_config(
    path: str, numbers: dict[str, Any], revision: str | None, **values: Any
) -> SimpleNamespace:
    """What is read of vLLM's ModelConfig; where it was read and by whom differs by path."""
    hf = {
        **numbers,
        "_name_or_path": path,
        "_attn_implementation_autoset": path == "/models/a",
        "transformers_version": f"5.{len(path)}",
    }
    return SimpleNamespace(
        model=path,
        revision=revision,
        hf_text_config=SimpleNamespace(to_dict=lambda: hf),
        **{"dtype": "torch.bfloat16", "quantization": None, **values},
    )


def identity(
    path: str | Path = "/models/a",
    numbers: dict[str, Any] | None = None,
    revision: str | None = None,
    model_id: str | None = None,
    draft: tuple[str, str | Path] | None = None,
    **values: Any,
) -> ModelIdentity:
    """The identity of an engine with such a configuration."""
    speculative = None
    if draft is not None:
        method, place = draft
        speculative = SimpleNamespace(
            method=method, draft_model_config=model_config(str(place), NUMBERS, None)
        )
    config = SimpleNamespace(
        model_config=model_config(str(path), numbers or NUMBERS, revision, **values),
        speculative_config=speculative,
    )
    return model_identity(config, model_id)


def differences(one: ModelIdentity, other: ModelIdentity) -> list[str]:
    """Names of what differs, as two engines that send text to each other find out."""
    return [name for name, _, _ in ModelIdentity.differences(str(one), str(other))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one shape, and one of them on another host."""
    base = tmp_path_factory.mktemp("hosts")
    one = write_checkpoint(base / "one/ds", SMALL, seed=0)
    other = write_checkpoint(base / "other/ds", SMALL, seed=1)
    assert (one / "config.json").read_text() == (other / "config.json").read_text()
    return {"one": one, "other": other, "copy": shutil.copytree(one, base / "copy/ds")}


def test_other_weights_of_one_name_and_shape_are_another_model(folders: dict[str, Path]) -> None:
    """A rolling update, or one path on two hosts."""
    one, other = (identity(folders[name], model_id="ds") for name in ("one", "other"))
    assert differences(one, other) == ["weights"]
    assert one.weights != other.weights


def test_a_pull_from_other_weights_is_refused_with_both_values(folders: dict[str, Path]) -> None:
    one, other = (identity(folders[name], model_id="ds") for name in ("one", "other"))
    own, peer = (
        Description("e", f"{host}:1", str(found), 16, "bfloat16", [])
        for host, found in (("decode", one), ("prefill", other))
    )
    with pytest.raises(Incompatible) as error:
        choose_sources(own, [peer])
    for words in ("prefill:1", "the model's weights", one.weights, other.weights):
        assert words in str(error.value)
    choose_sources(own, [own])


def test_one_model_under_two_paths_is_one_with_a_model_id(folders: dict[str, Path]) -> None:
    """Neither the path nor transformers' version decides any byte."""
    one, copy = (identity(folders[name], model_id="ds") for name in ("one", "copy"))
    assert one == copy and str(one) == str(copy)
    assert differences(identity(folders["one"]), identity(folders["copy"])) == ["name"]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"numbers": NUMBERS | {"num_hidden_layers": 6}}, ["numbers"]),
        ({"numbers": NUMBERS | {"rope_parameters": {"factor": 41.0}}}, ["numbers"]),
        ({"revision": "v2"}, ["revision"]),
        ({"path": "/models/b"}, ["name"]),
        ({"dtype": "torch.float16"}, ["dtype"]),
        ({"quantization": "fp8"}, ["quantization"]),
    ],
    ids=str,
)
def test_what_decides_bytes_makes_another_model(change: dict[str, Any], names: list[str]) -> None:
    """3.5: same shapes and another path, same path and other numbers, another revision."""
    assert differences(identity(), identity(**change)) == names
    assert identity() != identity(**change)


def test_a_draft_model_is_part_of_it(folders: dict[str, Path]) -> None:
    """Its own caches are pulled, too: method, numbers and weights decide their bytes."""
    one, other, copy = (identity(draft=("eagle3", path)) for path in folders.values())
    assert differences(one, other) == ["draft"]
    assert one == copy  # where it lies decides nothing, once its weights are known
    assert differences(one, identity(draft=("mtp", folders["one"]))) == ["draft"]
    unknown = identity(draft=("mtp", "org/a")), identity(draft=("mtp", "org/b"))
    assert differences(*unknown) == ["draft"]


def test_a_draft_that_only_the_peer_has_does_not_matter() -> None:
    """Its KV is not asked for."""
    drafts = identity(draft=("mtp", "/models/a"))
    assert differences(identity(), drafts) == []
    assert differences(drafts, identity()) == ["draft"]


def test_a_name_on_a_hub_is_resolved_to_its_commit_and_weights(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch moves: main of last week and main of today are two models."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--ds"
    (cached / "refs").mkdir(parents=True)
    found = []
    for commit, host in (("c0ffee", "one"), ("decade", "other")):
        (cached / "refs/main").write_text(commit)
        shutil.copytree(folders[host], cached / "snapshots" / commit)
        found.append(identity("org/ds"))
    assert [one.revision for one in found] == ["c0ffee", "decade"]
    assert differences(*found) == ["revision", "weights"]
    local = identity(cached / "snapshots/c0ffee", model_id="org/ds")
    assert local == found[0]
    assert identity("s3://bucket/ds").revision == identity("org/none").revision == "main"


def test_the_cache_dtype_is_compared_by_value() -> None:
    """1.2: auto may differ between the sides although both say it; fp8 is one of two names."""

    def found(cache: str, dtype: str = "torch.bfloat16") -> str:
        config = SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype=cache),
            model_config=SimpleNamespace(dtype=dtype),
        )
        return kv_cache_dtype(config)

    assert found("auto") == found("bfloat16", "torch.float16") == "bfloat16"
    assert found("auto", "torch.float16") == "float16"
    assert found("fp8") == found("fp8_e4m3") == "fp8_e4m3" != found("fp8_e5m2")
    assert found("fp8_ds_mla") == "fp8_ds_mla"


def test_it_fits_the_message_that_carries_it_whatever_the_path() -> None:
    long = identity("/data" + "/x" * 400, draft=("eagle3", "/y" * 400), quantization="w8a8")
    assert len(str(long)) < 512
    ends = [identity("/data" + "/x" * 400 + end) for end in "ab"]
    begins = [identity(f"/{begin}" + "/x" * 400) for begin in "ab"]
    assert differences(*ends) == differences(*begins) == ["name"]
    assert differences(identity("a; revision=b"), identity("a")) == ["name"]


@pytest.mark.process
def test_every_process_finds_the_same() -> None:
    """Sets have another order in each; what has an address in its text is refused."""
    code = (
        "from tests.connector.test_identity import NUMBERS, identity;"
        "print(identity(numbers={**NUMBERS, 'x': {str(i) for i in range(20)}}))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1
