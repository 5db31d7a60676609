"""Launches for the tests: models that are a config.json alone, and vLLM's configuration of them.

There are no weights in these folders: whatever happens with them happens before weights are loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpp_connectors.demo.model import TinyModel
from kvpp_connectors.launch.problems import LaunchRefused

__all__ = [
    "engine_config",
    "refuse",
    "write_llama",
    "write_memcache",
    "write_mla",
    "write_mtp",
]

MAX_LENGTH = 512  # tokens


def write_mla(folder: Path, **changes: object) -> Path:
    """A DeepSeek-V2 model of 12 layers with some fields of its config.json changed."""
    return _write(folder, {**TinyModel(num_hidden_layers=12).config(), **changes})


def write_mtp(folder: Path) -> Path:
    """A DeepSeek-V3 model with one MTP layer."""
    return write_mla(
        folder,
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        num_nextn_predict_layers=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    )


def write_llama(folder: Path) -> Path:
    """A model without MLA."""
    return _write(
        folder,
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "float32",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 12,
            "vocab_size": 512,
            "max_position_embeddings": 2048,
        },
    )


def write_memcache(folder: Path) -> Path:
    """An mmc-local.conf. Nothing connects to what it names."""
    file = folder / "mmc-local.conf"
    file.write_text("ock.mmc.meta_service_url = tcp://127.0.0.1:5000\n")
    return file


def engine_config(model: Path, additional_config: dict[str, Any], **options: Any) -> Any:
    """The VllmConfig of a TP2 launch; ``options`` are fields of EngineArgs."""
    from vllm.engine.arg_utils import EngineArgs

    settings: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": MAX_LENGTH,
        "max_num_batched_tokens": 64,
        **options,
    }
    arguments = EngineArgs(model=str(model), additional_config=additional_config, **settings)
    return arguments.create_engine_config()


def refuse(model: Path, additional_config: dict[str, Any], **options: Any) -> LaunchRefused:
    """The refusal of a launch that must be refused; checks that vLLM's error shows all of it."""
    with pytest.raises(ValueError, match="KVPP refuses this launch") as caught:
        engine_config(model, additional_config, **options)
    error: Any = caught.value  # pydantic's ValidationError: VllmConfig is a pydantic dataclass
    (detail,) = error.errors()
    refusal = detail["ctx"]["error"]
    assert isinstance(refusal, LaunchRefused)
    assert str(refusal) in str(error)
    assert all(str(problem) in str(error) for problem in refusal.problems)
    return refusal


def _write(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    return folder
