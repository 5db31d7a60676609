"""The facts of a launch that the rules look at, read from vLLM's configuration once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvpp_connectors.launch.connectors import Connector, read_connector
from kvpp_connectors.launch.options import Settings, read_settings
from kvpp_connectors.launch.problems import Problem
from kvpp_core.policy import DecodePolicy

__all__ = ["CACHELESS", "Launch", "launch_from_vllm"]

CACHELESS = ("ngram", "ngram_gpu", "suffix", "medusa")  # proposers without attention


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch line. Defaults are those of a plain TP2 MLA launch with KVPP on."""

    settings: Settings = field(default_factory=lambda: Settings(enabled=True))
    unreadable: tuple[Problem, ...] = ()  # of additional_config
    model: str = "model"
    tp: int = 2
    pp: int = 1
    pcp: int = 1
    dcp: int = 1
    dp: int = 1
    num_layers: int = 27
    device_type: str = "cpu"
    use_mla: bool = True
    is_sparse: bool = False
    is_hybrid: bool = False
    enforce_eager: bool = True
    cudagraph_mode: str = "NONE"
    splitting_ops: tuple[str, ...] | None = None  # None: vLLM chooses
    inductor_partition: bool = False
    breakable_graphs: bool = False
    attention_quant_fusion: bool = False
    speculative_method: str | None = None
    dynamic_speculation: bool = False
    draft_uses_mla: bool = True  # also where no draft keeps a cache
    kv_cache_events: bool = False
    worker_cls: str = "auto"
    dual_batch_overlap: bool = False
    hisparse: bool = False
    kv_sharing_fast_prefill: bool = False
    load_failure_policy: str = "recompute"
    connector: Connector | None = None

    @property
    def kvpp(self) -> bool:
        """Whether KVPP is on. A switch that cannot be read was meant to be."""
        unread = any(problem.rule == "switch-is-boolean" for problem in self.unreadable)
        return self.settings.enabled or unread

    @property
    def connectors(self) -> tuple[Connector, ...]:
        """The connectors that hold or move KV: the children of a MultiConnector, or the one."""
        if self.connector is None:
            return ()
        return self.connector.children or (self.connector,)

    @property
    def has_our_connector(self) -> bool:
        """Whether a connector of this package serves the launch."""
        return any(connector.is_ours for connector in self.connectors)

    @property
    def mentions_our_connector(self) -> bool:
        """Whether one is ours, or may be a misspelt one of ours."""
        return any(connector.is_ours or connector.meant for connector in self.connectors)

    @property
    def owner_decode(self) -> bool:
        """Whether decode tokens are asked to attend at the owner of each layer."""
        return self.settings.options.decode is DecodePolicy.OWNER

    @property
    def workers(self) -> int:
        """Workers of one engine."""
        return self.tp * self.pp * self.pcp

    @property
    def layers_per_stage(self) -> int:
        """Target layers of the smallest pipeline stage under an even split."""
        return self.num_layers // self.pp


def launch_from_vllm(config: Any, device_type: str | None = None) -> Launch:
    """Read the facts from a VllmConfig, before or after its platform hook.

    Args:
        config: what vLLM made of the launch line.
        device_type: of the platform to judge for; the configuration's own if left out.
    """
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    model, parallel = config.model_config, config.parallel_config
    compilation = config.compilation_config
    speculative = config.speculative_config
    transfer = config.kv_transfer_config
    events = config.kv_events_config
    device_type = device_type or config.device_config.device_type
    settings, unreadable = read_settings(config.additional_config)
    return Launch(
        settings=settings,
        unreadable=tuple(unreadable),
        model=model.model,
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        dp=parallel.data_parallel_size,
        num_layers=model.get_total_num_hidden_layers(),
        device_type=device_type,
        use_mla=model.use_mla,
        is_sparse=hasattr(model.hf_text_config, "index_topk"),
        is_hybrid=model.is_hybrid,
        enforce_eager=model.enforce_eager,
        cudagraph_mode=_graph_mode(config, device_type),
        splitting_ops=None
        if compilation.splitting_ops is None
        else tuple(compilation.splitting_ops),
        inductor_partition=bool(compilation.use_inductor_graph_partition),
        breakable_graphs=is_breakable_cudagraph_enabled(),
        attention_quant_fusion=bool(compilation.pass_config.fuse_attn_quant),
        speculative_method=speculative.method if speculative else None,
        dynamic_speculation=bool(_since_032(speculative, "num_speculative_tokens_per_batch_size")),
        draft_uses_mla=_draft_uses_mla(speculative),
        kv_cache_events=bool(events and events.enable_kv_cache_events),
        worker_cls=parallel.worker_cls,
        dual_batch_overlap=parallel.enable_dbo,
        hisparse=_since_032(config.attention_config, "hisparse_config") is not None,
        kv_sharing_fast_prefill=config.cache_config.kv_sharing_fast_prefill,
        load_failure_policy=transfer.kv_load_failure_policy if transfer else "recompute",
        connector=read_connector(transfer),
    )


def _graph_mode(config: Any, device_type: str) -> str:
    """The CUDAGraphMode by name: what was asked for, or vLLM's default at this platform."""
    mode = config.compilation_config.cudagraph_mode
    if mode is None and device_type != "cpu":
        from vllm.config.vllm import OPTIMIZATION_LEVEL_TO_CONFIG

        defaults = OPTIMIZATION_LEVEL_TO_CONFIG[config.optimization_level]
        mode = defaults["compilation_config"]["cudagraph_mode"]
    return "NONE" if mode is None else str(getattr(mode, "name", mode))


def _since_032(config: Any, name: str) -> Any:
    """What vLLM 0.23 does not know yet; None there, and where there is no such configuration."""
    return getattr(config, name, None)


def _draft_uses_mla(speculative: Any) -> bool:
    draft = speculative.draft_model_config if speculative else None
    return draft is None or speculative.method in CACHELESS or bool(draft.use_mla)
