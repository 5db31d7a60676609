"""KVPP in a vLLM worker: a mixin over the platform's worker class.

Four seams: the memory that the worker reports, the placement of its caches, the first touch of
each layer, and the begin and end of a step. Everything else stays vLLM's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from kvpp_connectors.connector.host import own_host
from kvpp_connectors.connector.process import KvppFacts, layer_loads, publish
from kvpp_connectors.engine import groups
from kvpp_connectors.engine.configure import examine_resolved
from kvpp_connectors.engine.metrics import BroadcastCounters, MetricsPage, metrics_port
from kvpp_connectors.engine.owner_decode import OwnerDecode, unfit
from kvpp_connectors.engine.placement import (
    backing_buffer,
    block_size_of,
    check_own_caches,
    place,
    plan,
)
from kvpp_connectors.launch.options import read_settings
from kvpp_connectors.log import get_logger
from kvpp_connectors.vllm_api import hooks
from kvpp_connectors.vllm_api.scheduler_output import read_step
from kvpp_core.calibration import measure_costs
from kvpp_core.capacity import blocks_that_fit
from kvpp_core.device import Device, make_device
from kvpp_core.errors import PlanError
from kvpp_core.exchange import HeadExchange
from kvpp_core.group import KvppGroup
from kvpp_core.history import BlockHistory, ScheduledStep
from kvpp_core.layout import Placement, RankLayout, build_layout
from kvpp_core.manifest import Manifest, agree
from kvpp_core.pipeline import Pipeline, PipelineSettings
from kvpp_core.policy import BroadcastPolicy, CostModel, DecodePolicy
from kvpp_core.staging import allocate_staging
from kvpp_core.stats import PipelineStats
from kvpp_core.trace import Lane, Recording, SpanRecorder

__all__ = ["KvppWorkerMixin"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step whose forward is to come, and its active blocks."""

    step: ScheduledStep
    blocks: tuple[int, ...]

    @property
    def decodes(self) -> int:
        """Its decode tokens, one for each request that decodes."""
        return sum(request.is_decode for request in self.step.requests)

    @property
    def kind(self) -> str:
        """Prefill, decode or mixed, by what its requests do."""
        decodes = self.decodes
        if not decodes:
            return "prefill"
        return "decode" if decodes == len(self.step.requests) else "mixed"


class KvppWorkerMixin:
    """Mix in before a subclass of vLLM's Worker."""

    vllm_config: Any
    parallel_config: Any
    cache_config: Any
    compilation_config: Any
    model_runner: Any
    device: torch.device
    rank: int

    _kvpp_group: KvppGroup | None = None
    _kvpp_staging: torch.Tensor
    _kvpp_device: Device
    _kvpp_cost: CostModel
    _kvpp_placement: Placement
    _kvpp_pipeline: Pipeline | None = None
    _kvpp_metrics: MetricsPage | None = None
    _kvpp_history: BlockHistory
    _kvpp_layer_of: dict[str, int]  # transformer layer of each target component
    _kvpp_pending: _Pending | None = None
    _kvpp_decode: OwnerDecode | None = None
    _kvpp_spans: SpanRecorder

    def init_device(self) -> None:
        """Check launch and seams and make the group before anything costly is done."""
        examine_resolved(self.vllm_config)
        hooks.check_installed(self.vllm_config)
        super().init_device()  # type: ignore[misc]
        options = read_settings(self.vllm_config.additional_config)[0].options
        self._kvpp_options = options
        self._kvpp_group = groups.create(
            self.parallel_config.tensor_parallel_size,
            self.parallel_config.prefill_context_parallel_size,
            self.device,
            # A receiver waits for the owner's load and for the bytes.
            options.transfer_timeout_s + options.load_timeout_s,
        )
        self._kvpp_serve_metrics()
        # Taken now, so that vLLM's memory measurement sees it.
        self._kvpp_staging = allocate_staging(options.staging_bytes, self.device).view(torch.int8)
        self._kvpp_device = make_device(self.device.type, options.transfer_timeout_s)
        self._kvpp_cost = self._kvpp_find_cost()

    def determine_available_memory(self) -> int:
        """What the KVPP capacity would take without KVPP (section 2.2), in bytes.

        Raises:
            PlanError: the caches cannot be placed.
        """
        available = super().determine_available_memory()  # type: ignore[misc]
        specs = self.get_kv_cache_spec()  # type: ignore[attr-defined]
        assert self._kvpp_group is not None
        check_own_caches(self._kvpp_layers())
        drafts = hooks.draft_cache_names(self.model_runner, self._kvpp_layers())
        self._kvpp_placement = self._kvpp_plan(specs, drafts)
        self._kvpp_block_size = block_size_of(specs)
        reserve = self._kvpp_options.reserve_bytes
        self._kvpp_blocks = blocks_that_fit(self._kvpp_placement, available - reserve)
        logical = self._kvpp_placement.logical_bytes_per_block
        logger.info(
            "%s", _describe(self._kvpp_placement, self._kvpp_group, available, self._kvpp_blocks)
        )
        return self._kvpp_blocks * logical

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Lay out the final block count, agree with the group, and hook the layers.

        Raises:
            PlanError: the engine asks for more blocks than fit.
            ManifestMismatch: the ranks of the group do not agree.
        """
        if kv_cache_config.num_blocks > self._kvpp_blocks:
            raise PlanError(
                f"the engine asks for {kv_cache_config.num_blocks:,} blocks and "
                f"{self._kvpp_blocks:,} fit; lower --num-gpu-blocks-override"
            )
        layout = build_layout(self._kvpp_placement, kv_cache_config.num_blocks)
        self._kvpp_agree(layout)
        self._kvpp_spans = SpanRecorder()
        publish(KvppFacts(layout, self._kvpp_manifest, self._kvpp_spans))
        super().initialize_from_config(self._kvpp_place(kv_cache_config, layout))  # type: ignore[misc]
        self._kvpp_start(layout)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step; the pipeline begins in the forward's pre-hook and ends here."""
        pipeline = self._kvpp_pipeline
        assert pipeline is not None
        began = time.monotonic_ns()
        step = read_step(scheduler_output)
        if step.requests:  # an engine that has saves under way steps without any
            self._kvpp_spans.begin_step(began)
        pending = _Pending(step, self._kvpp_history.observe(step))
        self._kvpp_pending = pending
        try:
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
        except BaseException:
            pipeline.abort()
            raise
        finally:
            self._kvpp_pending = None
            if self._kvpp_decode is not None:
                self._kvpp_decode.end()
        if pipeline.in_step:
            pipeline.end()
            self._kvpp_record_step(pending, began)
        return output

    def shutdown(self) -> None:
        """Leave nothing in flight, then let vLLM shut down."""
        pipeline, self._kvpp_pipeline = self._kvpp_pipeline, None
        group, self._kvpp_group = self._kvpp_group, None
        metrics, self._kvpp_metrics = self._kvpp_metrics, None
        if metrics is not None:
            metrics.close()
        if pipeline is not None:
            logger.info("KVPP totals: %s", pipeline.stats.snapshot())
            pipeline.close()
        if group is not None:
            group.close()
        super().shutdown()  # type: ignore[misc]

    def kvpp_stats(self) -> dict[str, Any]:
        """Counters of this rank's pipeline, for ``collective_rpc("kvpp_stats")``."""
        assert self._kvpp_pipeline is not None
        stats = self._kvpp_pipeline.stats.snapshot()
        return stats | {"exchanged_bytes": self._kvpp_decode.bytes if self._kvpp_decode else 0}

    def kvpp_set_broadcast(self, policy: str) -> None:
        """Change the broadcast policy between steps, to measure it.

        Only through ``collective_rpc``, which reaches every rank between the same two steps.
        """
        assert self._kvpp_pipeline is not None
        self._kvpp_pipeline.set_policy(BroadcastPolicy(policy))

    def kvpp_trace_start(self, steps: int) -> None:
        """Record when what runs, of the last ``steps`` steps; forget what was recorded before.

        Only through ``collective_rpc``, so that all ranks number the steps alike.
        """
        self._kvpp_spans.start(steps)

    def kvpp_trace_take(self) -> Recording:
        """What was recorded since ``kvpp_trace_start``; recording ends."""
        return self._kvpp_spans.take()

    def kvpp_layout(self) -> dict[str, Any]:
        """Blocks, bytes and owned layers of this rank, for ``collective_rpc("kvpp_layout")``."""
        assert self._kvpp_pipeline is not None
        layout = self._kvpp_pipeline.layout
        placement = layout.placement
        return {
            "rank": placement.rank,
            "num_blocks": layout.num_blocks,
            "allocated_bytes": layout.size,
            "physical_bytes_per_block": placement.physical_bytes_per_block,
            "logical_bytes_per_block": placement.logical_bytes_per_block,
            "owned_layers": [placement.bundles[i].layer for i in placement.owned],
            "draft_layers": [draft.layer for draft in placement.drafts],
            "manifest": self._kvpp_manifest.digest(),
        }

    def _kvpp_record_step(self, pending: _Pending, began: int) -> None:
        if self._kvpp_spans.on:
            tokens = sum(request.new_tokens for request in pending.step.requests)
            self._kvpp_spans.add(
                Lane.COMPUTE, pending.kind, began, time.monotonic_ns(),
                tokens=tokens, requests=len(pending.step.requests), blocks=len(pending.blocks),
            )  # fmt: skip

    def _kvpp_serve_metrics(self) -> None:
        first = self._kvpp_options.metrics_port
        if first is None:
            return

        def stats() -> PipelineStats:
            pipeline = self._kvpp_pipeline
            return pipeline.stats if pipeline is not None else PipelineStats()

        port = metrics_port(first, self.parallel_config, self.rank)
        self._kvpp_metrics = MetricsPage(own_host(), port, BroadcastCounters(self.rank, stats))

    # What depends on the version of vLLM: here 0.32; `ascend/adapter_v023.py` has 0.23.

    def _kvpp_plan(self, specs: dict[str, Any], drafts: frozenset[str]) -> Placement:
        """Who owns what, from the worker's cache specifications."""
        assert self._kvpp_group is not None
        return plan(specs, drafts, self._kvpp_group, self._kvpp_options)

    def _kvpp_place(self, kv_cache_config: Any, layout: RankLayout) -> Any:
        """Make vLLM allocate by ``layout``: the configuration that it is handed."""
        return place(kv_cache_config, layout)

    def _kvpp_buffer(self, layout: RankLayout) -> torch.Tensor:
        """The KV memory that vLLM allocated, as bytes."""
        layers = self._kvpp_layers()
        return backing_buffer({name: layers[name].kv_cache for name in layout.components}, layout)

    def _kvpp_hook(self) -> None:
        """Make every target layer call `_kvpp_acquire` before it touches its cache."""
        hooks.hook_layers(self._kvpp_layers(), self._kvpp_layer_of, self._kvpp_acquire)

    def _kvpp_owner_decode(self, placement: Placement) -> OwnerDecode | None:
        """Hook the attention of every target layer, if decode tokens are to attend at the owner.

        Raises:
            KvppError: ``decode`` is owner, and an attention implementation does not take it.
        """
        from vllm.distributed.parallel_state import get_tp_group

        decode = self._kvpp_options.decode
        if decode is DecodePolicy.BROADCAST:
            return None
        owners = {
            component.name: (bundle.layer, owner)
            for bundle, owner in zip(placement.bundles, placement.owners, strict=True)
            for component in bundle.components
        }
        layers = self._kvpp_layers()
        if decode is DecodePolicy.AUTO:
            pcp = self.parallel_config.prefill_context_parallel_size
            reason = f"PCP is {pcp}" if pcp > 1 else unfit(layers, owners)
            if reason is not None:
                logger.info("kvpp.decode: auto broadcasts: %s", reason)
                return None
            logger.info("kvpp.decode: auto attends at the owner of each layer")
        exchange = HeadExchange(get_tp_group(), self._kvpp_spans)
        return OwnerDecode(exchange, layers, owners)

    def _kvpp_layers(self) -> dict[str, Any]:
        layers: dict[str, Any] = self.compilation_config.static_forward_context
        return layers

    def _kvpp_agree(self, layout: RankLayout) -> None:
        assert self._kvpp_group is not None
        placement, options = layout.placement, self._kvpp_options
        self._kvpp_manifest = Manifest(
            ranks=placement.ranks,
            block_size=self._kvpp_block_size,
            kv_cache_dtype=str(self.cache_config.cache_dtype),
            bundles=placement.bundles,
            owners=placement.owners,
        )
        run = {"num_blocks": layout.num_blocks, **options.model_dump(mode="json")}
        agree(self._kvpp_manifest, run, self._kvpp_group.ranks, self._kvpp_group.all_gather_bytes)

    def _kvpp_find_cost(self) -> CostModel:
        """What a broadcast costs in this group: as the options say, or measured."""
        options, group = self._kvpp_options, self._kvpp_group
        assert group is not None
        if options.broadcast_cost is not None:
            return options.broadcast_cost.model()
        started = time.monotonic()
        timeout = options.transfer_timeout_s
        cost = measure_costs(group, self._kvpp_device, self.device, timeout)
        logger.info("a broadcast costs %s (measured in %.2g s)", cost, time.monotonic() - started)
        return cost

    def _kvpp_start(self, layout: RankLayout) -> None:
        assert self._kvpp_group is not None
        options = self._kvpp_options
        pipeline = Pipeline(
            layout=layout,
            buffer=self._kvpp_buffer(layout),
            staging=self._kvpp_staging,
            group=self._kvpp_group,
            device=self._kvpp_device,
            settings=PipelineSettings(
                policy=options.broadcast,
                cost=self._kvpp_cost,
                transfer_timeout=options.transfer_timeout_s,
                load_timeout=options.load_timeout_s,
                poison_scratch=options.poison_scratch,
            ),
            spans=self._kvpp_spans,
        )
        self._kvpp_history = BlockHistory(self._kvpp_block_size)
        self._kvpp_layer_of = {
            c.name: bundle.layer for bundle in layout.placement.bundles for c in bundle.components
        }
        self._kvpp_hook()
        self._kvpp_decode = self._kvpp_owner_decode(layout.placement)
        self.model_runner.get_model().register_forward_pre_hook(self._kvpp_before_forward)
        self._kvpp_pipeline = pipeline
        logger.info(
            "KVPP: %s blocks (%s tokens) in %s bytes; broadcast %s; manifest %.12s",
            f"{layout.num_blocks:,}",
            f"{layout.num_blocks * self._kvpp_block_size:,}",
            f"{layout.size:,}",
            options.broadcast.value,
            self._kvpp_manifest.digest(),
        )

    def _kvpp_before_forward(self, model: torch.nn.Module, args: Any) -> None:
        """Begin the step that execute_model announced; dummy and profiling runs announce none."""
        pending, self._kvpp_pending = self._kvpp_pending, None
        if pending is None or self._kvpp_pipeline is None:
            return
        loads = layer_loads()
        fences = loads.take_fences() if loads is not None else None
        blocks = pending.blocks
        # Where layers are loaded in this step, their broadcasts carry how that went.
        if self._kvpp_decode is not None and fences is None:
            blocks = self._kvpp_history.of_prefills(pending.step)
            self._kvpp_decode.begin(pending.decodes)
        self._kvpp_pipeline.begin(
            blocks,
            fences,
            guarded=fences is not None,
            on_load_failed=loads.failed if loads is not None else None,
        )

    def _kvpp_acquire(self, component: str) -> None:
        """The first touch of a layer's cache: its load is submitted, then waited for."""
        loads = layer_loads()
        if loads is not None:
            loads.reached(self._kvpp_layer_of[component])
        assert self._kvpp_pipeline is not None
        self._kvpp_pipeline.acquire(component)


def _describe(placement: Placement, group: KvppGroup, available: int, blocks: int) -> str:
    owned = [placement.bundles[i].layer for i in placement.owned]
    share = f"layers {owned[0]}..{owned[-1]}" if owned else "no layer"
    drafts = f", {len(placement.drafts)} draft layers whole" if placement.drafts else ""
    without = available // placement.logical_bytes_per_block
    return (
        f"KVPP: rank {group.ranks[group.rank]} of group {list(group.ranks)} owns {share} "
        f"of {len(placement.bundles)}{drafts}; {blocks:,} blocks fit into {available:,} bytes at "
        f"{placement.physical_bytes_per_block:,} bytes per block, {without:,} without KVPP"
    )
