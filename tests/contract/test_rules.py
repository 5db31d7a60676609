"""Every rule has its one case, every legal row of the user guide passes, all problems are told.

Field reports 1.4 (combinations that explode later) and 7.2 (cache events, which are refused).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpp_connectors.launch.connectors import Connector, read_children
from kvpp_connectors.launch.facts import Launch
from kvpp_connectors.launch.options import KvppOptions, Settings
from kvpp_connectors.launch.problems import LaunchRefused, Severity
from kvpp_connectors.launch.rules import CACHE_UPDATE, CONNECTOR_RULES, LAUNCH_RULES, check
from kvpp_connectors.launch.validate import settings_problems
from kvpp_core.policy import DecodePolicy

P2P, POOL, MULTI = "MooncakeConnectorV2", "AscendStoreConnector", "MultiConnector"
EXTRA = "kv_connector_extra_config"

# The example of the user guide, "Combining Connectors", to the letter.
GUIDE_MULTI = """
{
  "kv_connector": "MultiConnector",
  "kv_role": "kv_producer",
  "kv_connector_extra_config": {
    "connectors": [
      {
        "kv_connector": "MooncakeConnectorV2",
        "kv_role": "kv_producer",
        "kv_port": 37000
      },
      {
        "kv_connector": "AscendStoreConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
          "backend": "memcache",
          "lookup_rpc_port": "0",
          "use_layerwise": false
        }
      }
    ]
  }
}
"""
GUIDE_P2P = '{"kv_connector":"MooncakeConnectorV2","kv_role":"kv_producer","kv_port":37000}'
GUIDE_MEMCACHE = (
    '{"kv_connector":"AscendStoreConnector","kv_role":"kv_producer","kv_connector_extra_config":'
    '{"lookup_rpc_port":"0","backend":"memcache","use_layerwise":false,"load_async":true}}'
)
GUIDE_LAYERWISE = (
    '{"kv_connector":"AscendStoreConnector","kv_role":"kv_both","kv_connector_extra_config":'
    '{"backend":"mooncake","use_layerwise":true,"load_async":false}}'
)


KEYS = ("kv_connector", "kv_role", "kv_port", EXTRA, "engine_id", "kv_load_failure_policy")
OFF = Settings(enabled=False)
OWNER = Settings(enabled=True, options=KvppOptions(decode=DecodePolicy.OWNER))


def connector(name: str, role: str | None = "kv_producer", **extra: Any) -> Connector:
    """The only connector of a launch."""
    listed = extra.get("connectors") if name == MULTI else None
    children = read_children(listed if isinstance(listed, list) else [], KEYS)
    return Connector("kv_transfer_config", name, role, extra, children=children)


def from_json(text: str) -> Connector:
    """The connector of a --kv-transfer-config."""
    found = json.loads(text)
    return connector(found["kv_connector"], found["kv_role"], **found.get(EXTRA, {}))


def multi(*children: object) -> Launch:
    """A launch with a MultiConnector."""
    return Launch(connector=connector(MULTI, connectors=list(children)))


def pool(**extra: Any) -> Launch:
    """A launch with a pool connector."""
    return Launch(connector=connector(POOL, **extra))


@dataclass(frozen=True)
class Case:
    """A launch that breaks one rule only, and the option and value that are to be named."""

    launch: Launch
    option: str
    value: str
    severity: Severity = Severity.REFUSED


GRAPHS = Launch(device_type="cuda", enforce_eager=False, cudagraph_mode="PIECEWISE")

LAUNCH_CASES = {
    "group-larger-than-one": Case(
        Launch(tp=1), "--tensor-parallel-size x --prefill-context-parallel-size", "1 x 1"
    ),
    "no-dcp": Case(Launch(dcp=2), "--decode-context-parallel-size", "2"),
    "mla-only": Case(Launch(model="llama", use_mla=False), "--model", "llama"),
    "no-hybrid-models": Case(Launch(model="kimi-linear", is_hybrid=True), "--model", "kimi-linear"),
    "no-sparse-attention-on-cuda-yet": Case(
        Launch(model="glm-5.2", is_sparse=True, device_type="cuda"), "--model", "glm-5.2"
    ),
    "owner-decode-where-proven": Case(
        Launch(device_type="cuda", settings=OWNER),
        "--additional-config.kvpp.decode",
        "owner (on cuda, PCP 1, MLA)",
    ),
    "no-full-graphs": Case(
        Launch(enforce_eager=False, cudagraph_mode="FULL_DECODE_ONLY"),
        "--compilation-config.cudagraph_mode",
        "FULL_DECODE_ONLY",
    ),
    "no-attention-quant-fusion": Case(
        replace(GRAPHS, attention_quant_fusion=True),
        "--compilation-config.pass_config.fuse_attn_quant",
        "true",
    ),
    "graphs-split-at-cache-update": Case(
        replace(GRAPHS, splitting_ops=("vllm::unified_mla_attention_with_output",)),
        "--compilation-config.splitting_ops",
        "vllm::unified_mla_attention_with_output",
    ),
    "no-inductor-partition": Case(
        replace(GRAPHS, inductor_partition=True),
        "--compilation-config.use_inductor_graph_partition",
        "true",
    ),
    "no-breakable-graphs": Case(
        replace(GRAPHS, breakable_graphs=True), "VLLM_USE_BREAKABLE_CUDAGRAPH", "1"
    ),
    "fixed-k-speculation": Case(
        Launch(speculative_method="mtp", dynamic_speculation=True),
        "--speculative-config.num_speculative_tokens_per_batch_size",
        "set",
    ),
    "known-speculation": Case(
        Launch(speculative_method="draft_model"), "--speculative-config.method", "draft_model"
    ),
    "connectors-need-mla-drafts": Case(
        Launch(
            speculative_method="eagle3",
            draft_uses_mla=False,
            connector=connector(P2P),
        ),
        "--speculative-config.model",
        P2P,
    ),
    "no-kv-events": Case(
        Launch(kv_cache_events=True), "--kv-events-config.enable_kv_cache_events", "true"
    ),
    "worker-class": Case(Launch(worker_cls="my.Worker"), "--worker-cls", "my.Worker"),
    "no-dual-batch-overlap": Case(Launch(dual_batch_overlap=True), "--enable-dbo", "true"),
    "no-hisparse": Case(Launch(hisparse=True), "--attention-config.hisparse_config", "set"),
    "no-kv-sharing": Case(
        Launch(kv_sharing_fast_prefill=True), "--kv-sharing-fast-prefill", "true"
    ),
    "ascend-transport": Case(
        Launch(device_type="npu", connector=connector(P2P, protocol="tcp")),
        f"kv_transfer_config.{EXTRA}.protocol",
        "tcp",
    ),
    "connectors-need-whole-tokens": Case(
        Launch(settings=OFF, dcp=2, connector=connector(POOL)),
        "--decode-context-parallel-size",
        "2",
    ),
    "layerwise-without-pcp": Case(
        Launch(pcp=2, connector=connector(POOL, use_layerwise=True)),
        "--prefill-context-parallel-size",
        "2",
    ),
    "pd-with-pcp-not-validated": Case(
        Launch(pcp=2, connector=connector(P2P)),
        "--prefill-context-parallel-size",
        "2",
        Severity.WARNING,
    ),
    "failed-loads-end-requests": Case(
        Launch(load_failure_policy="fail", connector=connector(POOL)),
        "kv_transfer_config.kv_load_failure_policy",
        "fail",
        Severity.WARNING,
    ),
    "worker-needs-the-switch": Case(
        Launch(settings=OFF, worker_cls="kvpp_connectors.engine.cuda.KvppGpuWorker"),
        "--worker-cls",
        "kvpp_connectors.engine.cuda.KvppGpuWorker",
    ),
    "saves-nothing": Case(
        Launch(num_layers=8, pp=2),  # 2 owned + 2 slots = all 4 layers of a stage
        "--tensor-parallel-size",
        "2, 4 layers in the smallest stage",
        Severity.WARNING,
    ),
}

CONNECTOR_CASES = {
    "known-connector": Case(
        Launch(connector=connector("NixlConnector")), "kv_transfer_config.kv_connector", "Nixl"
    ),
    "children-not-wrappers": Case(multi(), "kv_transfer_config.kv_connector", MULTI),
    "prefill-side-only": Case(
        Launch(connector=connector(P2P, "kv_consumer")), "kv_transfer_config.kv_role", "kv_consumer"
    ),
    "pool-role": Case(
        Launch(connector=connector(POOL, "kv_consumer", backend="memcache")),
        "kv_transfer_config.kv_role",
        "kv_consumer",
    ),
    "no-consumer-write-back": Case(
        pool(consumer_is_to_put=True), f"kv_transfer_config.{EXTRA}.consumer_is_to_put", "True"
    ),
    "connector-names": Case(
        Launch(settings=OFF, connector=connector("MooncakeConectorV2")),
        "kv_transfer_config.kv_connector",
        "MooncakeConectorV2",
    ),
}

CASES = LAUNCH_CASES | CONNECTOR_CASES


def test_every_rule_has_a_case() -> None:
    """A new rule must come with a launch that breaks it, and names are unique."""
    assert {rule.name for rule in LAUNCH_RULES} == set(LAUNCH_CASES)
    assert {rule.name for rule in CONNECTOR_RULES} == set(CONNECTOR_CASES)
    assert len(LAUNCH_RULES) + len(CONNECTOR_RULES) == len(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_the_only_problem_and_names_everything(name: str) -> None:
    """Option and value are those of the launch line; reason and remedy are there to read."""
    case = CASES[name]
    (problem,) = check(case.launch)
    assert problem.rule == name
    assert problem.option == case.option
    assert case.value in problem.value
    assert problem.severity is case.severity
    for text in (problem.reason, problem.remedy):
        assert len(text.split()) >= 2 and text.endswith((".", ".)", "?"))
    shown = str(problem)
    assert all(part in shown for part in (name, case.option, case.value, problem.remedy))


LEGAL = {
    "TP": Launch(tp=8, num_layers=78),
    "PP": Launch(tp=8, pp=2, num_layers=78),
    "PCP x TP": Launch(tp=4, pcp=2, num_layers=61),
    "PCP alone": Launch(tp=1, pcp=4, num_layers=61),
    "eager": Launch(enforce_eager=True),
    "eager, with a graph mode that it switches off": Launch(cudagraph_mode="FULL_AND_PIECEWISE"),
    "PIECEWISE": Launch(enforce_eager=False, cudagraph_mode="PIECEWISE"),
    "no graphs": Launch(enforce_eager=False, cudagraph_mode="NONE"),
    "PIECEWISE on CUDA": GRAPHS,
    "the cache update among the user's own splits": replace(
        GRAPHS,
        splitting_ops=("vllm::unified_mla_attention_with_output", CACHE_UPDATE),
    ),
    "the same, by overload": replace(GRAPHS, splitting_ops=(f"{CACHE_UPDATE}.default",)),
    "no splits, which vLLM takes as no graphs": replace(GRAPHS, splitting_ops=()),
    "SFA": Launch(is_sparse=True),
    "sparse on NPUs, in graphs": Launch(
        device_type="npu", is_sparse=True, enforce_eager=False, cudagraph_mode="PIECEWISE"
    ),
    "NPUs' protocol": Launch(device_type="npu", connector=connector(P2P, protocol="ascend")),
    "another protocol elsewhere": Launch(connector=connector(P2P, protocol="tcp")),
    "MTP": Launch(speculative_method="mtp"),
    "n-grams of the prompt": Launch(speculative_method="ngram"),
    "n-grams, on the device": Launch(speculative_method="ngram_gpu"),
    "suffixes": Launch(speculative_method="suffix"),
    "Medusa's heads": Launch(speculative_method="medusa"),
    "PCP with whole blocks": Launch(pcp=2, connector=connector(POOL)),
    "Eagle3": Launch(speculative_method="eagle3"),
    "DSpark": Launch(speculative_method="dspark"),
    "a draft with heads of its own": Launch(speculative_method="eagle3", draft_uses_mla=False),
    "P/D, prefill side": Launch(connector=from_json(GUIDE_P2P)),
    "memcache, kv_producer": Launch(connector=from_json(GUIDE_MEMCACHE)),
    "memcache, kv_both": Launch(connector=replace(from_json(GUIDE_MEMCACHE), role="kv_both")),
    "memcache, loads in the step": pool(backend="memcache", load_async=False),
    "mooncake, whole blocks": pool(backend="mooncake", use_layerwise=False, load_async=True),
    "mooncake, layerwise": Launch(connector=from_json(GUIDE_LAYERWISE)),
    "mooncake, layerwise, with distance": pool(
        backend="mooncake", use_layerwise=True, load_async=False, layerwise_prefetch_layers=2
    ),
    "MultiConnector of the guide": Launch(connector=from_json(GUIDE_MULTI)),
    "MultiConnector, wrapper with another role": Launch(
        connector=replace(from_json(GUIDE_MULTI), role="kv_both")
    ),
    "the platform's own worker": Launch(worker_cls="vllm.v1.worker.cpu_worker.CPUWorker"),
    "the worker of a launch that was configured before": Launch(
        worker_cls="kvpp_connectors.engine.cpu.worker.KvppCpuWorker"
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_rows_of_the_support_table_pass(name: str) -> None:
    """Neither a refusal nor a warning. EP, chunked prefill, prefix caching and asynchronous
    scheduling are no facts of a Launch at all: no rule can refuse them."""
    assert check(LEGAL[name]) == []


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_every_full_graph_mode_is_refused_unless_eager(mode: str) -> None:
    launch = Launch(enforce_eager=False, cudagraph_mode=mode)
    assert [problem.rule for problem in check(launch)] == ["no-full-graphs"]
    assert check(replace(launch, enforce_eager=True)) == []


@pytest.mark.parametrize(
    ("layers", "ranks", "warned"), [(4, 2, True), (5, 2, True), (6, 2, False), (4, 4, False)]
)
def test_the_warning_starts_where_nothing_is_saved(layers: int, ranks: int, warned: bool) -> None:
    """ceil(layers / ranks) + 2 >= layers: section 2.2."""
    found = [problem.rule for problem in check(Launch(tp=ranks, num_layers=layers))]
    assert found == (["saves-nothing"] if warned else [])


# What each broken launch rule changes; the rules that one could hide behind another are left out.
_CHANGES: dict[str, dict[str, Any]] = {
    name: {
        field: getattr(case.launch, field)
        for field in Launch.__slots__
        if getattr(case.launch, field) != getattr(Launch(), field)
    }
    for name, case in LAUNCH_CASES.items()
    if name
    not in (
        "ascend-transport",
        "connectors-need-mla-drafts",
        "group-larger-than-one",
        "known-speculation",
        "no-breakable-graphs",
        # about connectors, or where KVPP is off
        "connectors-need-whole-tokens",
        "layerwise-without-pcp",
        "pd-with-pcp-not-validated",
        "failed-loads-end-requests",
        "worker-needs-the-switch",
    )
}


@pytest.mark.parametrize(
    ("device", "protocol", "refused"), [("npu", "tcp", 1), ("npu", "ascend", 0), ("cpu", "tcp", 0)]
)
def test_a_pool_names_its_transport_in_another_place(
    device: str, protocol: str, refused: int
) -> None:
    """As `kvpp pool up` prints it: an engine on NPUs could not use that."""
    named = connector(POOL, mooncake={"protocol": protocol})
    told = check(Launch(device_type=device, connector=named))
    assert [problem.rule for problem in told] == ["ascend-transport"] * refused


@settings(deadline=None)
@given(broken=st.sets(st.sampled_from(sorted(_CHANGES))), child=st.sampled_from(sorted(CASES)))
def test_all_broken_rules_are_told_at_once_refusals_first(broken: set[str], child: str) -> None:
    """Any set of broken launch rules and a broken connector: exactly these, warnings last."""
    changes: dict[str, Any] = {}
    # Full graphs last: the other rules about graphs ask for piecewise ones, any will do.
    for name in sorted(broken, key=lambda name: (name == "no-full-graphs", name)):
        changes |= _CHANGES[name]
    expected = set(broken)
    if child in CONNECTOR_CASES:
        changes["connector"] = CONNECTOR_CASES[child].launch.connector
        expected.add(child)
    found = check(Launch(**changes))
    assert {problem.rule for problem in found} == expected
    assert len(found) == len(expected)
    severities = [problem.severity for problem in found]
    assert severities == sorted(severities)  # "refused" < "warning"


def test_the_refusal_lists_every_problem_with_a_number() -> None:
    problems = check(Launch(tp=2, dcp=2, use_mla=False, num_layers=4))
    text = str(LaunchRefused(problems))
    assert "3 problems" in text
    assert [text.index(f"{n}. {problem}") for n, problem in enumerate(problems, 1)]
    assert "1 problem:" in str(LaunchRefused(problems[:1]))


def test_problems_of_a_child_name_its_index() -> None:
    """Each child is validated by itself; the wrapper's role changes nothing."""
    launch = multi(
        {"kv_connector": P2P, "kv_role": "kv_consumer"},
        {"kv_connector": POOL, "kv_role": "kv_both", EXTRA: {"backend": "memcache"}},
        {
            "kv_connector": POOL,
            "kv_role": "kv_consumer",
            EXTRA: {"use_layerwise": True, "load_async": True, "prefetch_layers": 1},
        },
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    )
    base = f"kv_transfer_config.{EXTRA}.connectors"
    assert [(problem.rule, problem.option) for problem in check(launch)] == [
        ("prefill-side-only", f"{base}[0].kv_role"),
        ("pool-role", f"{base}[2].kv_role"),
        ("known-connector", f"{base}[3].kv_connector"),
        ("one-of-a-kind", f"{base}[2].kv_connector"),
    ]
    settings = settings_problems(launch.connectors[2])
    assert [(problem.rule, problem.option) for problem in settings] == [
        ("layerwise-loads-in-step", f"{base}[2].{EXTRA}.load_async"),
        ("connector-settings", f"{base}[2].{EXTRA}.prefetch_layers"),
    ]


# extra config of a pool; rule, key, what is said of it
POOL_SETTINGS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "layer by layer with MemCache": (
        {"backend": "memcache", "use_layerwise": True},
        "memcache-whole-blocks", "use_layerwise", "True",
    ),
    "layer by layer, between steps": (
        {"backend": "mooncake", "use_layerwise": True, "load_async": True},
        "layerwise-loads-in-step", "load_async", "True",
    ),
    "a backend that is none": ({"backend": "redis"}, "connector-settings", "backend", "redis"),
    "parts of blocks": (
        {"discard_partial_chunks": False}, "connector-settings", "discard_partial_chunks", "False",
    ),
    "a misspelt key": (
        {"use_layer_wise": False}, "connector-settings", "use_layer_wise", "False",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POOL_SETTINGS)
def test_a_pools_own_settings_are_refused_once_with_or_without_kvpp(name: str) -> None:
    """They stand with the options, and in no second place: `check` says nothing of them."""
    extra, rule, key, value = POOL_SETTINGS[name]
    assert check(pool(**extra)) == []
    (problem,) = settings_problems(connector(POOL, **extra))
    assert (problem.rule, problem.option) == (rule, f"kv_transfer_config.{EXTRA}.{key}")
    assert value in problem.value and problem.reason and problem.remedy


@pytest.mark.parametrize(
    "extra",
    [{}, {"connectors": []}, {"connectors": {}}, {"connectors": P2P}, {"connectors": None}],
    ids=["no key", "empty list", "an object", "a string", "null"],
)
def test_a_multi_connector_without_children_is_refused(extra: dict[str, Any]) -> None:
    launch = Launch(connector=connector(MULTI, **extra))
    (problem,) = check(launch)
    assert problem.rule == "children-not-wrappers"
    assert f"{EXTRA}.connectors" in problem.remedy


def test_a_nested_multi_connector_is_refused() -> None:
    inner = {
        "kv_connector": MULTI,
        "kv_role": "kv_producer",
        EXTRA: {"connectors": [{"kv_connector": P2P, "kv_role": "kv_producer"}]},
    }
    (problem,) = check(multi({"kv_connector": P2P, "kv_role": "kv_producer"}, inner))
    assert problem.rule == "children-not-wrappers"
    assert problem.option.startswith(f"kv_transfer_config.{EXTRA}.connectors[1].")


@pytest.mark.parametrize(
    ("child", "rules"),
    [
        *((child, ["child-is-an-object"]) for child in (P2P, None, 7, [P2P])),
        ({}, ["child-has-a-type", "child-has-a-role"]),
        ({"kv_role": "kv_producer"}, ["child-has-a-type"]),
    ],
)
def test_a_child_that_is_no_connector_is_refused_by_index(child: object, rules: list[str]) -> None:
    """It must not be dropped in silence: the site would run without its pool or its P/D."""
    good = {"kv_connector": P2P, "kv_role": "kv_producer"}
    problems = check(multi(good, child))
    assert [problem.rule for problem in problems] == rules
    assert all("connectors[1]" in problem.option for problem in problems)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MooncakeConectorV2", P2P),
        ("mooncakeconnectorv2", P2P),
        ("MooncakeConnectorV1", P2P),
        ("AscendStoreConector", POOL),
        ("MultiConector", MULTI),
    ],
)
@pytest.mark.parametrize("settings", [OFF, Settings(enabled=True)], ids=["off", "on"])
def test_a_misspelt_connector_is_refused_with_the_nearest(
    settings: Settings, name: str, meant: str
) -> None:
    launch = Launch(settings=settings, connector=connector(name))
    (problem,) = check(launch)
    assert problem.rule == "connector-names"
    assert problem.remedy.startswith(f"Did you mean {meant!r}?")


def test_a_connector_that_somebody_registered_is_not_misspelt() -> None:
    """vLLM has a MooncakeConnector; with KVPP off it is nobody's business here."""
    foreign = replace(connector("MooncakeConnector"), foreign=True)
    assert check(Launch(settings=OFF, connector=foreign)) == []
    assert [p.rule for p in check(Launch(connector=foreign))] == ["known-connector"]


def ports(**options: Any) -> list[tuple[str, str, str]]:
    """(rule, option, value) of what is wrong with the ports of a launch with a P/D connector."""
    kv_port, metrics_port = options.pop("kv_port", 37000), options.pop("metrics_port", None)
    settings = Settings(enabled=True, options=KvppOptions(metrics_port=metrics_port))
    p2p = replace(connector(P2P), port=kv_port)
    launch = Launch(**{"settings": settings, "connector": p2p, **options})
    return [(problem.rule, problem.option, problem.value) for problem in check(launch)]


@pytest.mark.parametrize(
    ("kv_port", "workers", "good"),
    [
        (0, {}, True),
        (1, {}, True),
        ("37000", {}, True),
        (65534, {}, True),
        (65535, {}, False),
        (65520, {"tp": 4, "pp": 2, "dp": 2}, True),
        (65521, {"tp": 4, "pp": 2, "dp": 2}, False),
        (65536, {}, False),
        (65537, {}, False),
        (-1, {}, False),
        (-5, {}, False),
        ("-5", {}, False),
        ("10.0.0.1:80", {}, False),
        (None, {}, False),
        (True, {}, False),
        ([37000], {}, False),
    ],
)
def test_every_worker_has_a_port(kv_port: object, workers: dict[str, int], good: bool) -> None:
    """-5 would listen at 65,531 and 65,537 at 1."""
    refused = [("port-range", "kv_transfer_config.kv_port", repr(kv_port))]
    assert ports(kv_port=kv_port, **workers) == ([] if good else refused)


@pytest.mark.parametrize(
    ("first", "good"), [(65534, True), (65535, False), (36998, True), (36999, False), (37002, True)]
)
def test_metrics_have_ports_of_their_own(first: int, good: bool) -> None:
    """Two workers at 37000 and 37001; 0 takes free ports, which meet none."""
    found = ports(metrics_port=first)
    option = "additional_config.kvpp.metrics_port"
    assert [problem[1] for problem in found] == ([] if good else [option])
    assert ports(metrics_port=first, kv_port=0) == ([] if first < 65535 else found)


def test_a_childs_ports_are_checked_as_well() -> None:
    launch = multi({"kv_connector": P2P, "kv_role": "kv_producer", "kv_port": 70000})
    (problem,) = check(launch)
    option = f"kv_transfer_config.{EXTRA}.connectors[0].kv_port"
    assert (problem.rule, problem.option) == ("port-range", option)
    assert "65534" in problem.remedy
