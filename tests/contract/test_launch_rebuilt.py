"""A configuration that was accepted and is rebuilt by vLLM, and a launch that only looks like one
because its worker class is one of ours, given by hand.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpp_connectors.engine.workers import KVPP_WORKERS
from kvpp_connectors.launch import validate as gate
from kvpp_connectors.launch.facts import Launch
from kvpp_connectors.launch.problems import Problem
from tests.contract.launches import engine_config, refuse

ON = {"enable_kvpp": True}
PROFILE = {"kvpp": {"cpu_profile": True}}
OURS = [*KVPP_WORKERS.values(), "kvpp_connectors.engine.cpu.worker.CpuProfileWorker"]
BAD: dict[str, dict[str, Any]] = {  # by the rule that refuses it
    "group-larger-than-one": {"tensor_parallel_size": 1},
    "no-dual-batch-overlap": {"enable_dbo": True},
    "no-full-graphs": {
        "enforce_eager": False,
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
    },
    "known-connector": {
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    },
}


@pytest.mark.parametrize("worker_cls", OURS)
@pytest.mark.parametrize("rule", BAD)
def test_a_worker_class_of_ours_given_by_hand_passes_no_rule(
    mla_model: Path, worker_cls: str, rule: str
) -> None:
    """It looks like a configuration that was accepted and is rebuilt, and is none."""
    (problem,) = refuse(mla_model, ON, worker_cls=worker_cls, **BAD[rule]).problems
    assert problem.rule == rule


@pytest.mark.parametrize("worker_cls", OURS)
def test_a_worker_class_of_ours_given_by_hand_changes_nothing(
    mla_model: Path, worker_cls: str
) -> None:
    """A good launch gets the worker class and the profile that it would get without."""
    config = engine_config(mla_model, ON, worker_cls=worker_cls, enable_prefix_caching=True)
    assert config.parallel_config.worker_cls == KVPP_WORKERS["cpu"]
    assert config.cache_config.enable_prefix_caching is True
    assert "-rotary_embedding" in config.compilation_config.custom_ops


@pytest.mark.parametrize("additional_config", [{}, {"enable_kvpp": False}, PROFILE], ids=json.dumps)
@pytest.mark.parametrize("worker_cls", KVPP_WORKERS.values())
def test_the_kvpp_worker_without_the_switch_is_refused(
    mla_model: Path, worker_cls: str, additional_config: dict[str, Any]
) -> None:
    """It would run KVPP in a launch that no rule has looked at."""
    (problem,) = refuse(mla_model, additional_config, worker_cls=worker_cls).problems
    assert (problem.rule, problem.value) == ("worker-needs-the-switch", worker_cls)
    assert "enable_kvpp" in problem.remedy


Rebuild = Callable[[Any], Any]


def _rebuild_dataclasses(config: Any) -> Any:
    return dataclasses.replace(config)


def _rebuild_vllm(config: Any) -> Any:
    from vllm.config.utils import replace

    return replace(config)


def _rebuild_draft(config: Any) -> Any:
    """As vLLM makes the configuration of a draft model (create_vllm_config_for_draft_model)."""
    from vllm.config.utils import replace

    draft = config.speculative_config
    return replace(
        config,
        quant_config=None,
        model_config=draft.draft_model_config,
        parallel_config=replace(
            draft.draft_parallel_config,
            rank=config.parallel_config.rank,
            worker_cls=config.parallel_config.worker_cls,
        ),
    )


def _rebuild_in_a_worker(config: Any) -> Any:
    """As it arrives in another process, and the draft model's there."""
    return _rebuild_draft(pickle.loads(pickle.dumps(config)))  # noqa: S301


REBUILDS = [_rebuild_dataclasses, _rebuild_vllm, _rebuild_draft, _rebuild_in_a_worker]


@pytest.mark.parametrize("rebuild", REBUILDS)
@pytest.mark.parametrize("additional_config", [ON, PROFILE], ids=["kvpp", "profile"])
def test_a_rebuilt_configuration_is_accepted_and_keeps_everything(
    mtp_model: Path, additional_config: dict[str, Any], rebuild: Rebuild
) -> None:
    """vLLM rebuilds configurations in workers, for draft models; the hook then runs again."""
    first = engine_config(
        mtp_model,
        additional_config,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )
    second = rebuild(first)
    assert second is not first
    assert second.additional_config == additional_config
    assert second.parallel_config.worker_cls == first.parallel_config.worker_cls
    assert second.parallel_config.worker_cls in OURS
    for config in (first, second):
        assert config.scheduler_config.enable_chunked_prefill is True
        assert config.cache_config.enable_prefix_caching is True
        assert config.scheduler_config.max_num_batched_tokens == 64
        assert config.compilation_config.custom_ops.count("-rotary_embedding") == 1


@pytest.mark.parametrize("rebuild", REBUILDS)
def test_no_rule_is_asked_about_a_rebuilt_configuration(
    mtp_model: Path, monkeypatch: pytest.MonkeyPatch, rebuild: Rebuild
) -> None:
    """A draft's facts are not the launch's: with TP1 drafts, say, the rules would refuse it."""
    first = engine_config(
        mtp_model, ON, speculative_config={"method": "mtp", "num_speculative_tokens": 1}
    )
    asked: list[Launch] = []

    def check(launch: Launch) -> list[Problem]:
        asked.append(launch)
        return []

    monkeypatch.setattr(gate, "check", check)
    rebuild(first)
    assert asked == []
    engine_config(mtp_model, ON)
    assert len(asked) == 2  # as the user asked for it, and as vLLM resolved it
