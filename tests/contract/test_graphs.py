"""Graphs must be split at the cache update, or it replays without KVPP's wait.

vLLM decides that after its platform's hook, in `CompilationConfig.set_splitting_ops_for_v1`. These
tests ask it, so that the rules refuse what it would capture and nothing else; there is no GPU here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpp_connectors.engine.worker import KvppWorkerMixin
from kvpp_connectors.launch.facts import Launch, launch_from_vllm
from kvpp_connectors.launch.options import Settings
from kvpp_connectors.launch.problems import LaunchRefused
from kvpp_connectors.launch.rules import CACHE_UPDATE, check
from tests.contract.launches import engine_config

ATTENTION = "vllm::unified_mla_attention_with_output"

# options of CompilationConfig, and the rules that they break
SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "as vLLM chooses": ({}, []),
    "split there too": ({"splitting_ops": [ATTENTION, CACHE_UPDATE]}, []),
    "not split: no graphs": ({"splitting_ops": []}, []),
    "split at the attention alone": (
        {"splitting_ops": [ATTENTION]},
        ["graphs-split-at-cache-update"],
    ),
    "attention and quantisation fused": (
        {"pass_config": {"fuse_attn_quant": True}},
        ["no-attention-quant-fusion"],
    ),
    "fused, and not split by the user's own word": (
        {"pass_config": {"fuse_attn_quant": True}, "splitting_ops": []},
        ["no-attention-quant-fusion"],
    ),
    "partitioned by Inductor": (
        {"use_inductor_graph_partition": True},
        ["no-inductor-partition"],
    ),
}


def compilation_config(**options: Any) -> Any:
    """A CompilationConfig that asks for PIECEWISE, before vLLM chooses where to split."""
    from vllm.config import CompilationConfig, CompilationMode

    return CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode="PIECEWISE", **options
    )


def launch_on_cuda(vllm_config: Any, **options: Any) -> Launch:
    """The launch as if it were one on CUDA, with graphs. Changes ``vllm_config``."""
    vllm_config.device_config.device_type = "cuda"
    vllm_config.model_config.enforce_eager = False
    vllm_config.compilation_config = compilation_config(**options)
    return replace(launch_from_vllm(vllm_config), settings=Settings(enabled=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_rules_say_is_what_vllm_does(mla_model: Path, name: str) -> None:
    """A launch is refused if, and only if, vLLM would capture the cache update."""
    options, expected = SETTINGS[name]
    found = [
        problem.rule for problem in check(launch_on_cuda(engine_config(mla_model, {}), **options))
    ]
    assert found == expected
    resolved = compilation_config(**options)
    resolved.set_splitting_ops_for_v1("allgather_reducescatter")
    mode, ops = resolved.cudagraph_mode.name, resolved.splitting_ops
    harmless = mode == "NONE" or (mode == "PIECEWISE" and CACHE_UPDATE in ops)
    assert harmless is (expected == [])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_worker_looks_at_what_vllm_made_of_it(mla_model: Path, name: str) -> None:
    """Before it takes a device, with the modes that vLLM has chosen in the end."""
    options, expected = SETTINGS[name]
    config = engine_config(mla_model, {"enable_kvpp": True})
    launch_on_cuda(config, **options)
    config.compilation_config.set_splitting_ops_for_v1("allgather_reducescatter")
    if not expected:
        with pytest.raises(_Reached):
            _worker(config).init_device()
        return
    with pytest.raises(LaunchRefused) as caught:
        _worker(config).init_device()
    assert expected[0] in [problem.rule for problem in caught.value.problems]


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_the_worker_refuses_full_graphs_however_they_came(mla_model: Path, mode: str) -> None:
    from vllm.config import CUDAGraphMode

    config = engine_config(mla_model, {"enable_kvpp": True})
    launch_on_cuda(config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    with pytest.raises(LaunchRefused, match="no-full-graphs"):
        _worker(config).init_device()


def test_the_fused_update_is_no_split(mla_model: Path) -> None:
    """One's own splits do not make Inductor's partition safe: vLLM fuses the update by default."""
    launch = launch_on_cuda(
        engine_config(mla_model, {}),
        use_inductor_graph_partition=True,
        splitting_ops=[ATTENTION, CACHE_UPDATE],
    )
    assert [problem.rule for problem in check(launch)] == ["no-inductor-partition"]


class _Reached(Exception):
    """The worker below the mixin was asked for its device."""


class _Below:
    def init_device(self) -> None:
        raise _Reached


class _Worker(KvppWorkerMixin, _Below):
    pass


def _worker(config: Any) -> _Worker:
    worker = _Worker()
    worker.vllm_config = config
    return worker
