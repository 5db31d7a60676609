"""Through vLLM's own EngineArgs: what is refused before weights are loaded, and what a good launch
gets. The models are a config.json alone, so nothing here can have loaded weights.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpp_connectors.engine.workers import KVPP_WORKERS
from kvpp_connectors.launch import platforms
from kvpp_connectors.launch.connectors import Connector
from kvpp_connectors.launch.facts import Launch, launch_from_vllm
from kvpp_connectors.launch.options import KvppOptions, Settings
from kvpp_connectors.launch.problems import LaunchRefused
from kvpp_core.policy import DecodePolicy
from tests.contract.launches import MAX_LENGTH, engine_config, refuse
from tests.contract.test_rules import GUIDE_MEMCACHE, GUIDE_MULTI, GUIDE_P2P

ON = {"enable_kvpp": True}
PROFILE = {"kvpp": {"cpu_profile": True}}
PROFILE_WORKER = "kvpp_connectors.engine.cpu.worker.CpuProfileWorker"
PLATFORM_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def rules(refusal: LaunchRefused) -> list[str]:
    """The rules of a refusal, in its order."""
    return [problem.rule for problem in refusal.problems]


REFUSED: dict[str, dict[str, Any]] = {
    "group-larger-than-one": {"tensor_parallel_size": 1},
    "no-dcp": {"decode_context_parallel_size": 2},
    "worker-class": {"worker_cls": "my_site.worker.Worker"},
    "no-dual-batch-overlap": {"enable_dbo": True},
    "no-kv-sharing": {"kv_sharing_fast_prefill": True},
    "no-kv-events": {"kv_events_config": {"enable_kv_cache_events": True}},
    "known-connector": {
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    },
    "prefill-side-only": {
        "kv_transfer_config": {
            "kv_connector": "MooncakeConnectorV2",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
        }
    },
}


@pytest.mark.parametrize("rule", REFUSED)
def test_a_bad_option_is_refused(mla_model: Path, rule: str) -> None:
    """The rule reaches the user through EngineArgs, and nothing else is reported."""
    assert rules(refuse(mla_model, ON, **REFUSED[rule])) == [rule]


def test_a_model_without_mla_is_refused(llama_model: Path) -> None:
    (problem,) = refuse(llama_model, ON).problems
    assert problem.rule == "mla-only"
    assert problem.value == str(llama_model)


def test_mla_that_is_switched_off_is_refused(
    mla_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert rules(refuse(mla_model, ON)) == ["mla-only"]


def test_dynamic_k_speculation_is_refused(mtp_model: Path) -> None:
    speculation = {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [(1, 4, 3), (5, 16, 1)],
    }
    refusal = refuse(mtp_model, ON, speculative_config=speculation)
    assert rules(refusal) == ["fixed-k-speculation"]


def test_a_platform_without_a_worker_of_ours_is_refused(
    mla_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "KVPP_DEVICES", ("cuda",))
    (problem,) = refuse(mla_model, ON).problems
    assert (problem.rule, problem.value) == ("platform", "cpu")
    assert "cuda" in problem.reason and problem.remedy


def test_all_problems_are_in_one_error(llama_model: Path) -> None:
    """Keys, option values, launch and connector rules together, each once."""
    refusal = refuse(
        llama_model,
        {"enable_kvpp": True, "kvpp_size": 2, "kvpp": {"broadcast": "all", "ownr": 1}},
        tensor_parallel_size=1,
        enable_dbo=True,
        kv_transfer_config={
            "kv_connector": "AscendStoreConnector",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {"backend": "memcache", "use_layerwise": True},
        },
    )
    assert sorted(rules(refusal)) == sorted(
        [
            "known-keys",
            "option-values",
            "option-values",
            "group-larger-than-one",
            "mla-only",
            "no-dual-batch-overlap",
            "pool-role",
            "memcache-whole-blocks",
        ]
    )


@pytest.mark.parametrize(
    "additional_config",
    [
        {"enable_kvpp": "true"},
        {"enable_kvpp": 1},
        {"enable_kvp": True},
        {"enable_kpvp": True},
        {"kvpp_size": 2},
        {"kvpp": {"staging_bytes": "32MiB"}},
        {"enable_kvpp": False, "kvpp": {"brodcast": "auto"}},
        {"Enable_KVPP": True},
        {"enable_kvpp": False, "metrics_port": 9400},
    ],
    ids=json.dumps,
)
def test_bad_keys_are_refused_even_where_kvpp_would_be_off(
    mla_model: Path, additional_config: dict[str, Any]
) -> None:
    """A typing error must not start an engine that silently lacks KVPP."""
    assert len(refuse(mla_model, additional_config).problems) == 1


@pytest.mark.parametrize("name", ["MooncakeConectorV2", "AscendStoreConector", "MultiConector"])
def test_a_misspelt_connector_is_refused_even_where_kvpp_is_off(mla_model: Path, name: str) -> None:
    """vLLM itself would say so later, and without the nearest name."""
    transfer = {"kv_connector": name, "kv_role": "kv_producer"}
    (problem,) = refuse(mla_model, {}, kv_transfer_config=transfer).problems
    assert (problem.rule, problem.value) == ("connector-names", name)
    assert "Did you mean" in problem.remedy


def test_vllms_own_connectors_are_left_alone(mla_model: Path) -> None:
    """One of them is named almost like ours."""
    transfer = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}
    config = engine_config(mla_model, {}, kv_transfer_config=transfer)
    assert config.kv_transfer_config.kv_connector_module_path is None
    assert config.parallel_config.worker_cls == PLATFORM_WORKER
    assert not hasattr(config.device_config, "kvpp_accepted")


@pytest.mark.parametrize("port", [-5, 65535, 65537])
@pytest.mark.parametrize("switch", [ON, {}], ids=["on", "off"])
def test_ports_that_are_none_are_refused(
    mla_model: Path, switch: dict[str, Any], port: int
) -> None:
    transfer = {**json.loads(GUIDE_P2P), "kv_port": port}
    (problem,) = refuse(mla_model, switch, kv_transfer_config=transfer).problems
    assert (problem.rule, problem.option) == ("port-range", "kv_transfer_config.kv_port")


def test_speculation_without_a_cache_is_taken(mla_model: Path) -> None:
    """N-grams of the prompt: the proposer has no model, so there is nothing to keep apart."""
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    config = engine_config(
        mla_model,
        ON,
        speculative_config=speculation,
        kv_transfer_config=json.loads(GUIDE_P2P),
    )
    assert config.parallel_config.worker_cls == KVPP_WORKERS["cpu"]
    assert launch_from_vllm(config).draft_uses_mla is True


def test_a_switch_that_cannot_be_read_does_not_hide_the_other_problems(mla_model: Path) -> None:
    refusal = refuse(mla_model, {"enable_kvpp": "yes"}, enable_dbo=True)
    assert sorted(rules(refusal)) == ["no-dual-batch-overlap", "switch-is-boolean"]


def test_a_good_launch_gets_the_kvpp_worker_and_the_profile(mla_model: Path) -> None:
    config = engine_config(mla_model, ON)
    assert config.parallel_config.worker_cls == KVPP_WORKERS["cpu"]
    assert config.compilation_config.custom_ops[-1] == "-rotary_embedding"
    assert config.additional_config == ON


def test_the_worker_class_can_be_found(mla_model: Path) -> None:
    """The name is that of a class which vLLM can load: a subclass of the platform's worker."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    for additional_config in (ON, PROFILE):
        config = engine_config(mla_model, additional_config)
        found = resolve_obj_by_qualname(config.parallel_config.worker_cls)
        assert issubclass(found, resolve_obj_by_qualname(PLATFORM_WORKER))


@pytest.mark.parametrize("additional_config", [ON, PROFILE], ids=["kvpp", "profile"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("budget", [MAX_LENGTH, 777])
def test_scheduling_is_as_the_user_said(
    mla_model: Path, additional_config: dict[str, Any], chunked: bool, prefix: bool, budget: int
) -> None:
    """On and off alike: vLLM's CPU platform alone switches both off for MLA."""
    config = engine_config(
        mla_model,
        additional_config,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=prefix,
        max_num_batched_tokens=budget,
    )
    assert config.scheduler_config.enable_chunked_prefill is chunked
    assert config.cache_config.enable_prefix_caching is prefix
    assert config.scheduler_config.max_num_batched_tokens == budget


def test_a_budget_below_the_model_length_stays(mla_model: Path) -> None:
    config = engine_config(mla_model, ON, max_num_batched_tokens=64)
    assert config.scheduler_config.max_num_batched_tokens == 64
    assert config.scheduler_config.enable_chunked_prefill is True
    assert config.cache_config.enable_prefix_caching is True


def test_without_the_profile_vllm_itself_switches_these_off(mla_model: Path) -> None:
    """What the tests above restore is really taken away by the platform."""
    config = engine_config(mla_model, {}, enable_prefix_caching=True)
    assert config.scheduler_config.enable_chunked_prefill is False
    assert config.cache_config.enable_prefix_caching is False
    assert config.scheduler_config.max_num_batched_tokens > 64
    assert "-rotary_embedding" not in config.compilation_config.custom_ops
    assert config.parallel_config.worker_cls == PLATFORM_WORKER


def test_custom_ops_of_the_user_stay(mla_model: Path) -> None:
    for mine, expected in (
        (["all", "-rms_norm"], ["all", "-rms_norm", "-rotary_embedding"]),
        (["none", "-rotary_embedding"], ["none", "-rotary_embedding"]),
        # The user's own +rotary_embedding is left to the start-up check of the model.
        (["none", "+rotary_embedding"], ["none", "+rotary_embedding"]),
    ):
        config = engine_config(mla_model, ON, compilation_config={"custom_ops": list(mine)})
        assert config.compilation_config.custom_ops == expected


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_full_graphs_are_refused_where_the_platform_would_drop_them(
    mla_model: Path, mode: str
) -> None:
    """vLLM's CPU platform has no graphs: what the user asked for is judged, not what is left."""
    graphs: dict[str, Any] = {
        "enforce_eager": False,
        "compilation_config": {"cudagraph_mode": mode},
    }
    (problem,) = refuse(mla_model, ON, **graphs).problems
    assert (problem.rule, problem.value) == ("no-full-graphs", mode)
    assert "PIECEWISE" in problem.remedy and "--enforce-eager" in problem.remedy
    assert rules(refuse(mla_model, ON, **graphs, enable_dbo=True)) == [
        "no-full-graphs",
        "no-dual-batch-overlap",
    ]
    assert engine_config(mla_model, {}, **graphs).compilation_config.cudagraph_mode.name == "NONE"


def test_full_graphs_that_vllm_chose_by_itself_are_refused(
    mla_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a platform with graphs FULL_AND_PIECEWISE is the default: PIECEWISE must be asked for."""
    import vllm.platforms

    platform = type(vllm.platforms.current_platform)
    monkeypatch.setattr(platform, "support_static_graph_mode", classmethod(lambda cls: True))
    (problem,) = refuse(mla_model, ON, enforce_eager=False).problems
    assert (problem.rule, problem.value) == ("no-full-graphs", "FULL_AND_PIECEWISE")


@pytest.mark.parametrize("mode", ["PIECEWISE", "NONE"])
@pytest.mark.parametrize("eager", [False, True])
def test_piecewise_graphs_are_taken(mla_model: Path, mode: str, eager: bool) -> None:
    config = engine_config(
        mla_model, ON, enforce_eager=eager, compilation_config={"cudagraph_mode": mode}
    )
    assert config.parallel_config.worker_cls == KVPP_WORKERS["cpu"]


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_eager_execution_has_no_graphs_whatever_their_mode(mla_model: Path, mode: str) -> None:
    config = engine_config(mla_model, ON, compilation_config={"cudagraph_mode": mode})
    assert config.parallel_config.worker_cls == KVPP_WORKERS["cpu"]


def test_fixed_k_speculation_is_taken(mtp_model: Path) -> None:
    config = engine_config(
        mtp_model, ON, speculative_config={"method": "mtp", "num_speculative_tokens": 2}
    )
    assert config.parallel_config.worker_cls == KVPP_WORKERS["cpu"]
    assert config.speculative_config.method == "mtp"


def eagle3(draft: Path) -> dict[str, Any]:
    """Options of a launch with an Eagle3 draft model."""
    return {
        "speculative_config": {
            "method": "eagle3",
            "model": str(draft),
            "num_speculative_tokens": 2,
        }
    }


def test_eagle3_drafts_are_taken_with_mla_or_heads(mla_model: Path, llama_model: Path) -> None:
    for draft, uses_mla in ((mla_model, True), (llama_model, False)):
        config = engine_config(mla_model, ON, **eagle3(draft))
        assert config.parallel_config.worker_cls == KVPP_WORKERS["cpu"]
        assert launch_from_vllm(config).draft_uses_mla is uses_mla


def test_a_draft_with_heads_is_refused_beside_a_connector(
    mla_model: Path, llama_model: Path
) -> None:
    """Its ranks keep different bytes of one layer."""
    p2p = {"kv_transfer_config": json.loads(GUIDE_P2P)}
    refusal = refuse(mla_model, ON, **eagle3(llama_model), **p2p)
    assert rules(refusal) == ["connectors-need-mla-drafts"]
    engine_config(mla_model, ON, **eagle3(mla_model), **p2p)


@pytest.mark.parametrize("text", [GUIDE_P2P, GUIDE_MEMCACHE, GUIDE_MULTI])
def test_connectors_of_the_guide_are_taken(mla_model: Path, text: str) -> None:
    """They are ours, whatever other plug-ins have registered under their names."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = engine_config(mla_model, ON, kv_transfer_config=json.loads(text))
    assert config.parallel_config.worker_cls == KVPP_WORKERS["cpu"]
    connector = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    assert connector.__name__ == json.loads(text)["kv_connector"]
    assert connector.__module__.startswith("kvpp_connectors.")


def test_a_launch_that_saves_nothing_is_warned_of_and_taken(
    mla_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = engine_config(mla_model, ON, pipeline_parallel_size=4)
    assert config.parallel_config.worker_cls == KVPP_WORKERS["cpu"]
    assert "[saves-nothing] --tensor-parallel-size = 2, 3 layers" in caplog.text


_MASTER = {"mooncake": {"master_server_address": "127.0.0.1:1"}}
_DECODE = {"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_consumer"}
_POOL = {
    "kv_connector": "AscendStoreConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": _MASTER,
}


@pytest.mark.parametrize(
    ("transfer", "warned"),
    [
        (_DECODE, True),
        (_DECODE | {"kv_role": "kv_producer"}, False),
        (_POOL, True),
        (_POOL | {"kv_role": "kv_consumer"}, False),
        (
            _POOL
            | {
                "kv_role": "kv_consumer",
                "kv_connector_extra_config": _MASTER | {"consumer_is_to_load": True},
            },
            True,
        ),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [_DECODE, _POOL]},
            },
            True,
        ),
    ],
    ids=["decode", "prefill", "pool", "pool that saves", "pool of a consumer", "both"],
)
@pytest.mark.parametrize("policy", [None, "fail", "recompute"])
def test_failed_loads_that_end_requests_are_warned_of(
    mla_model: Path,
    caplog: pytest.LogCaptureFixture,
    transfer: dict[str, Any],
    warned: bool,
    policy: str | None,
) -> None:
    """With KVPP and without: vLLM's default is `fail`."""
    given = {} if policy is None else {"kv_load_failure_policy": policy}
    engine_config(mla_model, {}, kv_transfer_config=transfer | given)
    said = "[failed-loads-end-requests] kv_transfer_config.kv_load_failure_policy = fail"
    assert (said in caplog.text) == (warned and policy != "recompute")


def test_the_cpu_profile_alone_chooses_its_worker(mla_model: Path) -> None:
    config = engine_config(mla_model, PROFILE, tensor_parallel_size=1)
    assert config.parallel_config.worker_cls == PROFILE_WORKER
    assert config.compilation_config.custom_ops[-1] == "-rotary_embedding"


def test_the_cpu_profile_alone_refuses_nothing(mla_model: Path, llama_model: Path) -> None:
    """Rules are about KVPP; a worker class of the user's own stays."""
    config = engine_config(mla_model, PROFILE, enable_dbo=True, worker_cls="my_site.Worker")
    assert config.parallel_config.worker_cls == "my_site.Worker"
    plain = engine_config(llama_model, PROFILE, decode_context_parallel_size=1)
    assert plain.parallel_config.worker_cls == PROFILE_WORKER
    assert "-rotary_embedding" not in plain.compilation_config.custom_ops


def test_kvpp_switched_off_in_words_is_a_plain_launch(mla_model: Path) -> None:
    config = engine_config(mla_model, {"enable_kvpp": False})
    assert config.parallel_config.worker_cls == PLATFORM_WORKER
    assert "-rotary_embedding" not in config.compilation_config.custom_ops


def _set(path: str, value: object) -> Callable[[Any], None]:
    """Set an attribute of a VllmConfig by its dotted path."""

    def change(config: Any) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            config = getattr(config, owner)
        setattr(config, name, value)

    return change


def _cudagraph_mode(config: Any) -> None:
    from vllm.config import CUDAGraphMode

    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY


def _kv_events(config: Any) -> None:
    from vllm.config import KVEventsConfig

    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True)


def _transfer(config: Any) -> None:
    from vllm.config import KVTransferConfig

    config.kv_transfer_config = KVTransferConfig(**json.loads(GUIDE_MEMCACHE))


def _model_property(name: str) -> Callable[[Any], None]:
    """Let a property of the model's configuration be True, in this copy alone."""

    def change(config: Any) -> None:
        model = config.model_config
        model.__class__ = type("Changed", (type(model),), {name: True})

    return change


def _sparse(config: Any) -> None:
    config.model_config.hf_text_config.index_topk = 2048


# field of Launch: (change of the VllmConfig, what is read then)
FACTS: dict[str, tuple[Callable[[Any], None], Any]] = {
    "model": (_set("model_config.model", "/models/glm"), "/models/glm"),
    "tp": (_set("parallel_config.tensor_parallel_size", 8), 8),
    "pp": (_set("parallel_config.pipeline_parallel_size", 3), 3),
    "pcp": (_set("parallel_config.prefill_context_parallel_size", 4), 4),
    "dcp": (_set("parallel_config.decode_context_parallel_size", 2), 2),
    "num_layers": (_set("model_config.model_arch_config.total_num_hidden_layers", 78), 78),
    "device_type": (_set("device_config.device_type", "cuda"), "cuda"),
    "use_mla": (_set("model_config.hf_text_config.is_causal", False), False),
    "is_sparse": (_sparse, True),
    "is_hybrid": (_model_property("is_hybrid"), True),
    "enforce_eager": (_set("model_config.enforce_eager", False), False),
    "cudagraph_mode": (_cudagraph_mode, "FULL_DECODE_ONLY"),
    "splitting_ops": (_set("compilation_config.splitting_ops", ["a", "b"]), ("a", "b")),
    "inductor_partition": (_set("compilation_config.use_inductor_graph_partition", True), True),
    "attention_quant_fusion": (
        _set("compilation_config.pass_config.fuse_attn_quant", True),
        True,
    ),
    "speculative_method": (_set("speculative_config.method", "eagle3"), "eagle3"),
    "dynamic_speculation": (
        _set("speculative_config.num_speculative_tokens_per_batch_size", [(1, 4, 3)]),
        True,
    ),
    "draft_uses_mla": (
        _set("speculative_config.draft_model_config.hf_text_config.is_causal", False),
        False,
    ),
    "kv_cache_events": (_kv_events, True),
    "worker_cls": (_set("parallel_config.worker_cls", "my.Worker"), "my.Worker"),
    "dual_batch_overlap": (_set("parallel_config.enable_dbo", True), True),
    "hisparse": (_set("attention_config.hisparse_config", object()), True),
    "settings": (
        _set("additional_config", {"kvpp": {"decode": "owner"}}),
        Settings(enabled=False, options=KvppOptions(decode=DecodePolicy.OWNER)),
    ),
    "dp": (_set("parallel_config.data_parallel_size", 4), 4),
    "kv_sharing_fast_prefill": (_set("cache_config.kv_sharing_fast_prefill", True), True),
    "connector": (
        _transfer,
        Connector(
            "kv_transfer_config",
            "AscendStoreConnector",
            "kv_producer",
            json.loads(GUIDE_MEMCACHE)["kv_connector_extra_config"],
        ),
    ),
}


@pytest.fixture(scope="module")
def mtp_launch(mtp_model: Path) -> Any:
    """A VllmConfig with a draft model."""
    return engine_config(
        mtp_model,
        {},
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )


def test_a_launch_is_read_from_vllm(mtp_launch: Any, mtp_model: Path) -> None:
    assert launch_from_vllm(mtp_launch) == Launch(
        model=str(mtp_model),
        tp=2,
        settings=Settings(enabled=False),
        num_layers=12,
        splitting_ops=(),  # what vLLM resolves to where nothing is compiled
        speculative_method="mtp",
        worker_cls=PLATFORM_WORKER,
    )


def test_every_fact_of_a_launch_is_tried_here() -> None:
    # An environment variable, what cannot be read, and one that comes with the connector.
    by_themselves = {"breakable_graphs", "unreadable", "load_failure_policy"}
    assert set(FACTS) | by_themselves == {field.name for field in dataclasses.fields(Launch)}


@pytest.mark.parametrize("name", FACTS)
def test_each_fact_is_read_from_its_own_option(mtp_launch: Any, name: str) -> None:
    """Changing one option of vLLM's configuration changes that field of the Launch alone."""
    change, expected = FACTS[name]
    before = launch_from_vllm(mtp_launch)
    changed = copy.deepcopy(mtp_launch)
    change(changed)
    found = launch_from_vllm(changed)
    if name == "connector":
        assert found.load_failure_policy == "fail"  # vLLM's default for every connector
        found = dataclasses.replace(found, load_failure_policy=before.load_failure_policy)
    assert found == dataclasses.replace(before, **{name: expected})


def test_breakable_graphs_are_read_from_the_environment(
    mtp_launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not launch_from_vllm(mtp_launch).breakable_graphs
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert launch_from_vllm(mtp_launch).breakable_graphs
