"""The facts of a launch that the rules look at, read from vLLM's configuration once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpp_connectors.launch.options import read_settings
from kvpp_core.policy import DecodePolicy

__all__ = ["Connector", "Launch", "launch_from_vllm", "mode_name"]


@dataclass(frozen=True, slots=True)
class Connector:
    """One KV connector of the launch. ``path`` names where it stands: the option or the child."""

    path: str
    name: str
    role: str | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    malformed_extra: object = None  # what stands there instead of an object

    @property
    def children(self) -> tuple[Connector, ...]:
        """The children of a MultiConnector, in order; empty for every other connector."""
        listed = self.extra.get("connectors", ()) if self.name == "MultiConnector" else ()
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            return ()
        return tuple(
            _child(f"{self.path}.kv_connector_extra_config.connectors[{index}]", child)
            for index, child in enumerate(listed)
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch line after vLLM has resolved it. Defaults are those of a plain TP2 MLA launch."""

    model: str = "model"
    tp: int = 2
    pp: int = 1
    pcp: int = 1
    dcp: int = 1
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
    draft_uses_mla: bool = True  # also where there is no draft model
    kv_cache_events: bool = False
    worker_cls: str = "auto"
    dual_batch_overlap: bool = False
    hisparse: bool = False
    kv_sharing_fast_prefill: bool = False
    owner_decode: bool = False
    connector: Connector | None = None

    @property
    def connectors(self) -> tuple[Connector, ...]:
        """The connectors that hold or move KV: the children of a MultiConnector, or the one."""
        if self.connector is None:
            return ()
        return self.connector.children or (self.connector,)

    @property
    def layers_per_stage(self) -> int:
        """Target layers of the smallest pipeline stage under an even split."""
        return self.num_layers // self.pp


def launch_from_vllm(config: Any) -> Launch:
    """Read the facts from a VllmConfig, before or after its platform hook."""
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    model, parallel = config.model_config, config.parallel_config
    compilation = config.compilation_config
    speculative = config.speculative_config
    transfer = config.kv_transfer_config
    events = config.kv_events_config
    return Launch(
        model=model.model,
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        num_layers=model.get_total_num_hidden_layers(),
        device_type=config.device_config.device_type,
        use_mla=model.use_mla,
        is_sparse=hasattr(model.hf_text_config, "index_topk"),
        is_hybrid=model.is_hybrid,
        enforce_eager=model.enforce_eager,
        cudagraph_mode=mode_name(compilation.cudagraph_mode),
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
        owner_decode=read_settings(config.additional_config or {})[0].options.decode
        is DecodePolicy.OWNER,
        connector=_connector(transfer) if transfer and transfer.kv_connector else None,
    )


def _connector(transfer: Any) -> Connector:
    return Connector(
        path="kv_transfer_config",
        name=transfer.kv_connector,
        role=transfer.kv_role,
        extra=transfer.kv_connector_extra_config,
    )


def _child(path: str, child: object) -> Connector:
    """A child of a MultiConnector. One that is no object gets a name that no connector has."""
    if not isinstance(child, Mapping):
        return Connector(path, name=f"{child!r}, which is no object", role=None)
    extra = child.get("kv_connector_extra_config") or {}
    malformed = None if isinstance(extra, Mapping) else extra
    return Connector(
        path=path,
        name=str(child.get("kv_connector")),
        role=child.get("kv_role"),
        extra=extra if malformed is None else {},
        malformed_extra=malformed,
    )


def _since_032(config: Any, name: str) -> Any:
    """What vLLM 0.23 does not know yet; None there, and where there is no such configuration."""
    return getattr(config, name, None)


def _draft_uses_mla(speculative: Any) -> bool:
    draft = speculative.draft_model_config if speculative else None
    return draft is None or bool(draft.use_mla)


def mode_name(mode: Any) -> str:
    """A CUDAGraphMode by name; None, before vLLM has chosen, counts as NONE."""
    return "NONE" if mode is None else str(getattr(mode, "name", mode))
