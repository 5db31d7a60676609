"""The support matrix as a table: what is refused before weights are loaded, and what is warned of.

Section 3 of the design specification and "Supported Features" of the user guide. One rule, one
row: the option it is about, when it is broken, why, and what to do instead. `check` reports all
broken rules at once. Most rows are about KVPP; those with ``always`` are about our connectors and
names, and hold without it too. What one option alone may be stands with the option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvpp_connectors.connector.names import MULTI, P2P, POOL
from kvpp_connectors.launch.connectors import Connector
from kvpp_connectors.launch.facts import CACHELESS, Launch
from kvpp_connectors.launch.platforms import PLATFORM_WORKERS
from kvpp_connectors.launch.ports import port_problems
from kvpp_connectors.launch.problems import Problem, Severity, refusals_first

__all__ = [
    "CACHE_UPDATE",
    "CONNECTOR_RULES",
    "LAUNCH_RULES",
    "ConnectorRule",
    "LaunchRule",
    "check",
]

FULL_GRAPHS = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
CACHE_UPDATE = "vllm::unified_mla_kv_cache_update"  # the operation that waits for a layer
FIXED_K_METHODS = ("mtp", "eagle3", "dspark")
OUR_WORKERS = "kvpp_connectors.engine."


@dataclass(frozen=True, slots=True)
class LaunchRule:
    """A rule about the launch as a whole."""

    name: str
    option: str
    broken: Callable[[Launch], bool]
    value: Callable[[Launch], object]
    reason: str
    remedy: str
    severity: Severity = Severity.REFUSED
    always: bool = False

    def problem(self, launch: Launch) -> Problem | None:
        """The problem, if the launch breaks this rule."""
        if not (launch.kvpp or self.always) or not self.broken(launch):
            return None
        value = str(self.value(launch))
        return Problem(self.name, self.option, value, self.reason, self.remedy, self.severity)


@dataclass(frozen=True, slots=True)
class ConnectorRule:
    """A rule about one KV connector: the only one, or a child of a MultiConnector."""

    name: str
    key: str  # below the connector's path
    applies_to: tuple[str, ...]  # connector names; empty means all
    broken: Callable[[Connector], bool]
    value: Callable[[Connector], object]
    reason: str
    remedy: str | Callable[[Connector], str]
    always: bool = False

    def problem(self, connector: Connector) -> Problem | None:
        """The problem, if the connector breaks this rule."""
        if self.applies_to and connector.name not in self.applies_to:
            return None
        if not self.broken(connector):
            return None
        option, value = f"{connector.path}.{self.key}", str(self.value(connector))
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(connector)
        return Problem(self.name, option, value, self.reason, remedy)


def _layerwise(launch: Launch) -> bool:
    return any(c.name == POOL and bool(c.extra.get("use_layerwise")) for c in launch.connectors)


def _moves_between_engines(launch: Launch) -> bool:
    return any(connector.name == P2P for connector in launch.connectors)


def _foreign_protocols(launch: Launch) -> list[str]:
    """What connectors ask for besides the protocol of NPUs."""
    given = [part for connector in launch.connectors for part in _transports(connector.extra)]
    return [str(part["protocol"]) for part in given if part.get("protocol", "ascend") != "ascend"]


def _transports(extra: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Where a connector's options may name Mooncake's transport: P/D's, and a pool's."""
    yield extra
    if isinstance(pool := extra.get("mooncake"), Mapping):
        yield pool


def _captures(launch: Launch) -> bool:
    """Whether parts of the model run as graphs that were captured once."""
    on_cuda = launch.device_type == "cuda" and not launch.enforce_eager
    return on_cuda and launch.cudagraph_mode != "NONE"


def _captures_the_update(launch: Launch) -> bool:
    """Whether splitting_ops leave the cache update inside a graph. An empty list: no graphs."""
    ops = launch.splitting_ops or (CACHE_UPDATE,)
    return _captures(launch) and CACHE_UPDATE not in [op.removesuffix(".default") for op in ops]


def _shares_cost_more(launch: Launch) -> bool:
    """Section 2.2: the largest share plus two scratch slots is no less than all layers."""
    share = -(-launch.layers_per_stage // max(launch.tp * launch.pcp, 1))
    return launch.tp * launch.pcp > 1 and share + 2 >= launch.layers_per_stage


LAUNCH_RULES = (
    LaunchRule(
        name="group-larger-than-one",
        option="--tensor-parallel-size x --prefill-context-parallel-size",
        broken=lambda launch: launch.tp * launch.pcp == 1,
        value=lambda launch: f"{launch.tp} x {launch.pcp}",
        reason="KVPP splits the layers over the TP x PCP group; a group of one has nobody to "
        "share with.",
        remedy="Use --tensor-parallel-size 2 or more, or switch KVPP off.",
    ),
    LaunchRule(
        name="no-dcp",
        option="--decode-context-parallel-size",
        broken=lambda launch: launch.dcp > 1,
        value=lambda launch: launch.dcp,
        reason="With DCP the ranks hold different tokens, so that a layer has no single owner.",
        remedy="Use --decode-context-parallel-size 1, or switch KVPP off.",
    ),
    LaunchRule(
        name="mla-only",
        option="--model",
        broken=lambda launch: not launch.use_mla,
        value=lambda launch: launch.model,
        reason="The model does not use MLA or SFA: its ranks hold different heads, and nothing is "
        "replicated that KVPP could split. (VLLM_MLA_DISABLE=1 turns MLA off too.)",
        remedy="Serve a DeepSeek-, GLM-5- or Kimi-class model, or switch KVPP off.",
    ),
    LaunchRule(
        name="no-hybrid-models",
        option="--model",
        broken=lambda launch: launch.is_hybrid,
        value=lambda launch: launch.model,
        reason="Hybrid models keep more than one kind of cache; KVPP handles one.",
        remedy="Serve a non-hybrid MLA or SFA model, or switch KVPP off.",
    ),
    LaunchRule(
        name="no-sparse-attention-on-cuda-yet",
        option="--model",
        broken=lambda launch: launch.is_sparse and launch.device_type == "cuda",
        value=lambda launch: launch.model,
        reason="On CUDA a sparse model writes its caches in a fused kernel at the start of the "
        "layer, before the place where this release waits for them.",
        remedy="Serve an MLA model without an indexer, or switch KVPP off.",
    ),
    LaunchRule(
        name="owner-decode-where-proven",
        option="--additional-config.kvpp.decode",
        broken=lambda launch: (
            launch.owner_decode
            and (launch.is_sparse or launch.pcp > 1 or launch.device_type != "cpu")
        ),
        value=lambda launch: (
            f"owner (on {launch.device_type}, PCP {launch.pcp}, "
            f"{'sparse' if launch.is_sparse else 'MLA'})"
        ),
        reason="Decode at the owner is made for MLA on the CPU: a sparse model's indexer reads "
        "history on every rank, PCP ranks hold different tokens, and decode kernels of "
        "accelerators prepare for one rank's heads.",
        remedy="Use decode = broadcast.",
    ),
    LaunchRule(
        name="no-full-graphs",
        option="--compilation-config.cudagraph_mode",
        broken=lambda launch: not launch.enforce_eager and launch.cudagraph_mode in FULL_GRAPHS,
        value=lambda launch: launch.cudagraph_mode,
        reason="A full graph replays without running KVPP's wait before each layer.",
        remedy='Use --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\' or --enforce-eager.',
    ),
    LaunchRule(
        name="no-attention-quant-fusion",
        option="--compilation-config.pass_config.fuse_attn_quant",
        broken=lambda launch: _captures(launch) and launch.attention_quant_fusion,
        value=lambda _: "true",
        reason="With it vLLM does not split the graphs at the attention: it turns PIECEWISE into "
        "FULL, and a full graph replays without running KVPP's wait before each layer.",
        remedy="Set it to false, or use --enforce-eager.",
    ),
    LaunchRule(
        name="graphs-split-at-cache-update",
        option="--compilation-config.splitting_ops",
        broken=_captures_the_update,
        value=lambda launch: ", ".join(launch.splitting_ops or ()),
        reason="The cache update would be inside a graph, which replays without running KVPP's "
        "wait.",
        remedy=f"Leave it out, or add {CACHE_UPDATE}.",
    ),
    LaunchRule(
        name="no-inductor-partition",
        option="--compilation-config.use_inductor_graph_partition",
        broken=lambda launch: _captures(launch) and launch.inductor_partition,
        value=lambda _: "true",
        reason="Inductor's partition leaves the cache update inside a graph, or fuses it with the "
        "rotary embedding there; it would replay without running KVPP's wait.",
        remedy="Set it to false, or use --enforce-eager.",
    ),
    LaunchRule(
        name="no-breakable-graphs",
        option="VLLM_USE_BREAKABLE_CUDAGRAPH",
        # vLLM sets it by itself for sparse models, which have a rule of their own.
        broken=lambda launch: (
            _captures(launch) and launch.breakable_graphs and not launch.is_sparse
        ),
        value=lambda _: "1",
        reason="Breakable graphs break at the attention only: the cache update is captured, and "
        "replays without running KVPP's wait.",
        remedy="Set VLLM_USE_BREAKABLE_CUDAGRAPH=0, or use --enforce-eager.",
    ),
    LaunchRule(
        name="fixed-k-speculation",
        option="--speculative-config.num_speculative_tokens_per_batch_size",
        broken=lambda launch: launch.dynamic_speculation,
        value=lambda _: "set",
        reason="Dynamic-K speculative decoding is not supported with KVPP.",
        remedy="Set num_speculative_tokens alone.",
    ),
    LaunchRule(
        name="known-speculation",
        option="--speculative-config.method",
        broken=lambda launch: (
            launch.speculative_method is not None
            and launch.speculative_method not in (*FIXED_K_METHODS, *CACHELESS)
        ),
        value=lambda launch: launch.speculative_method,
        reason="KVPP keeps draft caches apart from target caches and knows how to for "
        f"{', '.join(FIXED_K_METHODS)} only; {', '.join(CACHELESS)} keep none.",
        remedy=f"Use one of {', '.join((*FIXED_K_METHODS, *CACHELESS))}, or no speculation.",
    ),
    LaunchRule(
        name="connectors-need-mla-drafts",
        option="--speculative-config.model",
        broken=lambda launch: launch.connector is not None and not launch.draft_uses_mla,
        value=lambda launch: f"a draft without MLA, beside {launch.connectors[0].name}",
        reason="Each rank keeps other heads of such a draft's cache, and a KV connector takes "
        "draft layers from one rank.",
        remedy="Use a draft with MLA, no speculation, or no KV connector.",
    ),
    LaunchRule(
        name="no-kv-events",
        option="--kv-events-config.enable_kv_cache_events",
        broken=lambda launch: launch.kv_cache_events,
        value=lambda _: "true",
        reason="KV cache events describe whole blocks on one rank; under KVPP no rank has them.",
        remedy="Set it to false.",
    ),
    LaunchRule(
        name="worker-class",
        option="--worker-cls",
        broken=lambda launch: (
            launch.worker_cls not in PLATFORM_WORKERS
            and not launch.worker_cls.startswith(OUR_WORKERS)
        ),
        value=lambda launch: launch.worker_cls,
        reason="KVPP brings its own worker class and cannot be added to another one.",
        remedy="Leave --worker-cls out, or use --worker-extension-cls.",
    ),
    LaunchRule(
        name="no-dual-batch-overlap",
        option="--enable-dbo",
        broken=lambda launch: launch.dual_batch_overlap,
        value=lambda _: "true",
        reason="Two micro-batches run the layers in turns; KVPP's two scratch slots follow one.",
        remedy="Leave it out.",
    ),
    LaunchRule(
        name="no-hisparse",
        option="--attention-config.hisparse_config",
        broken=lambda launch: launch.hisparse,
        value=lambda _: "set",
        reason="HiSparse moves cache blocks between host and device by itself.",
        remedy="Leave it out.",
    ),
    LaunchRule(
        name="no-kv-sharing",
        option="--kv-sharing-fast-prefill",
        broken=lambda launch: launch.kv_sharing_fast_prefill,
        value=lambda _: "true",
        reason="Layers that share one cache would have two owners.",
        remedy="Leave it out.",
    ),
    LaunchRule(
        name="ascend-transport",
        option="kv_transfer_config.kv_connector_extra_config.protocol",
        broken=lambda launch: launch.device_type == "npu" and bool(_foreign_protocols(launch)),
        value=lambda launch: ", ".join(_foreign_protocols(launch)),
        reason="Mooncake reaches the memory of NPUs by its protocol ascend only.",
        remedy='Leave it out, or write "ascend"; of a pool it is mooncake.protocol.',
    ),
    LaunchRule(
        name="connectors-need-whole-tokens",
        option="--decode-context-parallel-size",
        always=True,
        broken=lambda launch: not launch.kvpp and launch.has_our_connector and launch.dcp > 1,
        value=lambda launch: launch.dcp,
        reason="With DCP a rank holds a part of each block's tokens; these connectors move whole "
        "blocks.",
        remedy=f"Use --decode-context-parallel-size 1, or no {P2P} and no {POOL}.",
    ),
    LaunchRule(
        name="layerwise-without-pcp",
        option="--prefill-context-parallel-size",
        always=True,
        broken=lambda launch: launch.pcp > 1 and _layerwise(launch),
        value=lambda launch: launch.pcp,
        reason="Layerwise pooling is not validated with PCP; Mooncake's restriction on it stays.",
        remedy="Use --prefill-context-parallel-size 1, or set use_layerwise to false.",
    ),
    LaunchRule(
        name="pd-with-pcp-not-validated",
        option="--prefill-context-parallel-size",
        always=True,
        broken=lambda launch: launch.pcp > 1 and _moves_between_engines(launch),
        value=lambda launch: launch.pcp,
        reason="P/D with PCP has been tried on ranks without a model only; Mooncake's restrictions "
        "on PCP stay.",
        remedy="Compare answers with those of a plain engine first, or use "
        "--prefill-context-parallel-size 1.",
        severity=Severity.WARNING,
    ),
    LaunchRule(
        name="failed-loads-end-requests",
        option="kv_transfer_config.kv_load_failure_policy",
        always=True,
        broken=lambda launch: (
            launch.load_failure_policy == "fail" and any(c.loads for c in launch.connectors)
        ),
        value=lambda launch: launch.load_failure_policy,
        reason="vLLM's default: a request whose blocks do not come from a peer or a pool that had "
        "them ends with an error.",
        remedy='Set "recompute" to have them computed here, or leave it if that must not happen.',
        severity=Severity.WARNING,
    ),
    LaunchRule(
        name="worker-needs-the-switch",
        option="--worker-cls",
        always=True,
        broken=lambda launch: (
            not launch.kvpp
            and launch.worker_cls.startswith(OUR_WORKERS)
            and ".Kvpp" in launch.worker_cls  # not the CPU profile's
        ),
        value=lambda launch: launch.worker_cls,
        reason="This worker class runs KVPP, which is not switched on.",
        remedy="Leave --worker-cls out, and use --additional-config '{\"enable_kvpp\": true}' for "
        "KVPP.",
    ),
    LaunchRule(
        name="saves-nothing",
        option="--tensor-parallel-size",
        broken=_shares_cost_more,
        value=lambda launch: f"{launch.tp}, {launch.layers_per_stage} layers in the smallest stage",
        reason="The layers that other ranks keep take no more memory than the two scratch slots: "
        "KVPP loses capacity or gains none.",
        remedy="Use fewer pipeline stages or switch KVPP off; `kvpp plan` prints the figures.",
        severity=Severity.WARNING,
    ),
)


CONNECTOR_RULES = (
    ConnectorRule(
        name="connector-names",
        key="kv_connector",
        applies_to=(),
        always=True,
        broken=lambda connector: connector.meant is not None,
        value=lambda connector: connector.name,
        reason="No connector has this name.",
        remedy=lambda c: f"Did you mean {c.meant!r}? Of another one give kv_connector_module_path.",
    ),
    ConnectorRule(
        name="known-connector",
        key="kv_connector",
        applies_to=(),
        broken=lambda c: bool(c.name) and not (c.is_ours or c.name == MULTI or c.meant),
        value=lambda connector: connector.name,
        reason="This connector does not know that a rank keeps only the layers it owns.",
        remedy=f"Use {P2P}, {POOL}, or both in a {MULTI}.",
    ),
    ConnectorRule(
        name="children-not-wrappers",
        key="kv_connector",
        applies_to=(MULTI,),
        broken=lambda connector: True,  # `Launch.connectors` lists one only where it cannot serve
        value=lambda connector: connector.name,
        reason="A MultiConnector needs a list of child connectors, and is not a child itself.",
        remedy=f"List {P2P} and {POOL} in kv_connector_extra_config.connectors.",
    ),
    ConnectorRule(
        name="prefill-side-only",
        key="kv_role",
        applies_to=(P2P,),
        broken=lambda connector: connector.role in ("kv_consumer", "kv_both"),
        value=lambda connector: connector.role,
        reason="KVPP runs on the prefill side of P/D disaggregation only.",
        remedy="Use kv_producer here, or switch KVPP off on the decode side.",
    ),
    ConnectorRule(
        name="pool-role",
        key="kv_role",
        applies_to=(POOL,),
        broken=lambda connector: connector.role == "kv_consumer",
        value=lambda connector: connector.role,
        reason="With KVPP the pool is validated for kv_producer and kv_both.",
        remedy="Use kv_producer or kv_both; both save and load.",
    ),
    ConnectorRule(
        name="no-consumer-write-back",
        key="kv_connector_extra_config.consumer_is_to_put",
        applies_to=(POOL,),
        broken=lambda c: bool(c.extra.get("consumer_is_to_put")),
        value=lambda c: c.extra.get("consumer_is_to_put"),
        reason="Consumer write-back is not supported with KVPP.",
        remedy="Leave it at false.",
    ),
)


def check(launch: Launch) -> list[Problem]:
    """All rules that a launch breaks, refusals first."""
    found = [
        *(rule.problem(launch) for rule in LAUNCH_RULES),
        *(rule.problem(connector) for connector in launch.connectors for rule in _rows(launch)),
    ]
    problems = [problem for problem in found if problem is not None]
    # How children are written is vLLM's business where none is ours and KVPP is off.
    if launch.kvpp or launch.mentions_our_connector:
        problems += [p for connector in launch.connectors for p in connector.unreadable]
    return refusals_first([*problems, *port_problems(launch)])


def _rows(launch: Launch) -> list[ConnectorRule]:
    return [rule for rule in CONNECTOR_RULES if launch.kvpp or rule.always]
