"""One rank's KVPP, from its group to its last step: budget, layout, pipeline.

vLLM asks its worker for these one after the other; `kvpp_connectors.engine.worker` passes them on.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch

from kvpp_connectors.connector.host import own_host
from kvpp_connectors.connector.process import KvppFacts, layer_loads, publish
from kvpp_connectors.engine import groups
from kvpp_connectors.engine.adapter import VllmAdapter, draft_cache_names
from kvpp_connectors.engine.metrics import BroadcastCounters, MetricsPage, metrics_port
from kvpp_connectors.engine.owner_decode import attend_at_owners, unfit
from kvpp_connectors.engine.placement import block_size_of, check_own_caches
from kvpp_connectors.engine.step_driver import StepDriver
from kvpp_connectors.launch.options import KvppOptions
from kvpp_connectors.log import get_logger
from kvpp_core.calibration import measure_costs
from kvpp_core.capacity import blocks_that_fit
from kvpp_core.device import make_device
from kvpp_core.errors import PlanError
from kvpp_core.exchange import HeadExchange
from kvpp_core.group import KvppGroup
from kvpp_core.layout import Placement, RankLayout, build_layout
from kvpp_core.manifest import Manifest, agree
from kvpp_core.pipeline import Pipeline, PipelineSettings
from kvpp_core.policy import CostModel, DecodePolicy
from kvpp_core.stats import PipelineStats
from kvpp_core.trace import SpanRecorder
from kvpp_core.transfer import allocate_staging

__all__ = ["KvppRank"]

logger = get_logger(__name__)


class KvppRank:
    """KVPP in one worker: budget, lay_out, start, steps, close. For the model's thread."""

    def __init__(self, worker: Any, adapter: VllmAdapter, options: KvppOptions) -> None:
        """Make the group and take staging memory, so that vLLM's memory measurement sees both.

        ``worker`` is vLLM's, with its device and without a model.
        """
        self._worker = worker
        self._adapter = adapter
        self.options = adapter.options(options)
        self.spans = SpanRecorder()
        self._exchange: HeadExchange | None = None
        self.driver: StepDriver | None = None  # once the caches are there
        with ExitStack() as opened:  # closed again where a later part does not start
            self.group = groups.create(
                worker.parallel_config.tensor_parallel_size,
                worker.parallel_config.prefill_context_parallel_size,
                worker.device,
                # A receiver waits for the owner's load and for the bytes.
                options.transfer_timeout_s + options.load_timeout_s,
            )
            opened.callback(self.group.close)
            self._metrics = self._serve_metrics()
            if self._metrics is not None:
                opened.callback(self._metrics.close)
            staging = allocate_staging(options.staging_bytes, worker.device)
            self._staging = staging.view(torch.int8)
            self._device = make_device(worker.device.type, options.transfer_timeout_s)
            self._cost = self._find_cost()
            opened.pop_all()

    def budget(self, available: int) -> int:
        """The bytes that the KVPP capacity would take without KVPP (section 2.2).

        ``available``: bytes that this worker has for its caches.

        Raises:
            PlanError: the caches cannot be placed.
        """
        specs, layers = self._worker.get_kv_cache_spec(), self._adapter.layers
        check_own_caches(layers)
        drafts = draft_cache_names(self._worker.model_runner, layers)
        self._placement = self._adapter.plan(specs, drafts, self.group, self.options)
        self._block_size = block_size_of(specs)
        self._blocks = blocks_that_fit(self._placement, available - self.options.reserve_bytes)
        logger.info("%s", _describe(self._placement, self.group, available, self._blocks))
        return self._blocks * self._placement.logical_bytes_per_block

    def lay_out(self, kv_cache_config: Any) -> Any:
        """Lay out the final block count and agree on it: the configuration by which vLLM allocates.

        Raises:
            PlanError: the engine asks for more blocks than fit, or plans other caches.
            ManifestMismatch: the ranks of the group do not agree.
        """
        if kv_cache_config.num_blocks > self._blocks:
            raise PlanError(
                f"the engine asks for {kv_cache_config.num_blocks:,} blocks and "
                f"{self._blocks:,} fit; lower --num-gpu-blocks-override"
            )
        self._layout = build_layout(self._placement, kv_cache_config.num_blocks)
        self._manifest = self._agree(self._layout)
        publish(KvppFacts(self._layout, self._manifest, self.spans))
        return self._adapter.place(kv_cache_config, self._layout)

    def start(self) -> None:
        """Hook the model over the caches that vLLM allocated; steps may run from now on.

        Raises:
            PlanError: a cache does not lie where it was laid out.
            KvppError: ``decode`` is owner, and an attention implementation does not take it.
        """
        layout = self._layout
        pipeline = Pipeline(
            layout=layout,
            buffer=self._adapter.buffer(layout),
            staging=self._staging,
            group=self.group,
            device=self._device,
            settings=self._pipeline_settings(),
            spans=self.spans,
        )
        layer_of = {
            component.name: bundle.layer
            for bundle in layout.placement.bundles
            for component in bundle.components
        }
        at_owner = self._decodes_at_owner(layout.placement)
        self.driver = driver = StepDriver(
            pipeline, self._block_size, layer_of, layer_loads, self.spans, owner_decode=at_owner
        )
        self._adapter.hook_layers(layer_of, driver.acquire)
        if at_owner:
            self._exchange = self._hook_owner_decode(layout.placement, driver)
        self._worker.model_runner.get_model().register_forward_pre_hook(
            lambda model, inputs: driver.begin()
        )
        logger.info(
            "KVPP: %s blocks (%s tokens) in %s bytes; broadcast %s; manifest %.12s",
            f"{layout.num_blocks:,}",
            f"{layout.num_blocks * self._block_size:,}",
            f"{layout.size:,}",
            self.options.broadcast.value,
            self._manifest.digest(),
        )

    def close(self) -> None:
        """Leave nothing in flight."""
        driver, self.driver = self.driver, None
        if self._metrics is not None:
            self._metrics.close()
        if driver is not None:
            logger.info("KVPP totals: %s", driver.pipeline.stats.snapshot())
            driver.pipeline.close()
        self.group.close()

    def stats(self) -> dict[str, Any]:
        """Counters of this rank's pipeline, and bytes of queries and results over its group."""
        exchanged = self._exchange.bytes if self._exchange is not None else 0
        return self._pipeline_stats().snapshot() | {"exchanged_bytes": exchanged}

    def describe_layout(self) -> dict[str, Any]:
        """Blocks, bytes and owned layers of this rank."""
        placement = self._layout.placement
        return {
            "rank": placement.rank,
            "num_blocks": self._layout.num_blocks,
            "allocated_bytes": self._layout.size,
            "physical_bytes_per_block": placement.physical_bytes_per_block,
            "logical_bytes_per_block": placement.logical_bytes_per_block,
            "owned_layers": [placement.bundles[i].layer for i in placement.owned],
            "draft_layers": [draft.layer for draft in placement.drafts],
            "manifest": self._manifest.digest(),
        }

    def _pipeline_stats(self) -> PipelineStats:
        return self.driver.pipeline.stats if self.driver is not None else PipelineStats()

    def _serve_metrics(self) -> MetricsPage | None:
        first, worker = self.options.metrics_port, self._worker
        if first is None:
            return None
        port = metrics_port(first, worker.parallel_config, worker.rank)
        counters = BroadcastCounters(worker.rank, self._pipeline_stats)
        return MetricsPage(own_host(), port, counters)

    def _find_cost(self) -> CostModel:
        """What a broadcast costs in this group: as the options say, or measured."""
        if self.options.broadcast_cost is not None:
            return self.options.broadcast_cost.model()
        started = time.monotonic()
        timeout = self.options.transfer_timeout_s
        cost = measure_costs(self.group, self._device, self._worker.device, timeout)
        logger.info("a broadcast costs %s (measured in %.2g s)", cost, time.monotonic() - started)
        return cost

    def _agree(self, layout: RankLayout) -> Manifest:
        placement = layout.placement
        manifest = Manifest(
            ranks=placement.ranks,
            block_size=self._block_size,
            kv_cache_dtype=str(self._worker.cache_config.cache_dtype),
            bundles=placement.bundles,
            owners=placement.owners,
        )
        run = {"num_blocks": layout.num_blocks, **self.options.model_dump(mode="json")}
        agree(manifest, run, self.group.ranks, self.group.all_gather_bytes)
        return manifest

    def _pipeline_settings(self) -> PipelineSettings:
        return PipelineSettings(
            policy=self.options.broadcast,
            cost=self._cost,
            transfer_timeout=self.options.transfer_timeout_s,
            load_timeout=self.options.load_timeout_s,
            poison_scratch=self.options.poison_scratch,
        )

    def _decodes_at_owner(self, placement: Placement) -> bool:
        """Whether decode tokens attend at the owner of each layer."""
        decode = self.options.decode
        if decode is not DecodePolicy.AUTO:
            return decode is DecodePolicy.OWNER
        pcp = self._worker.parallel_config.prefill_context_parallel_size
        reason = f"PCP is {pcp}" if pcp > 1 else unfit(self._adapter.layers, _owners(placement))
        if reason is not None:
            logger.info("kvpp.decode: auto broadcasts: %s", reason)
            return False
        logger.info("kvpp.decode: auto attends at the owner of each layer")
        return True

    def _hook_owner_decode(self, placement: Placement, driver: StepDriver) -> HeadExchange:
        from vllm.distributed.parallel_state import get_tp_group

        exchange = HeadExchange(get_tp_group(), self.spans)
        attend_at_owners(exchange, self._adapter.layers, _owners(placement), driver.decode_tokens)
        return exchange


def _owners(placement: Placement) -> dict[str, tuple[int, int]]:
    """Each target component's transformer layer, and the group rank that keeps it."""
    return {
        component.name: (bundle.layer, owner)
        for bundle, owner in zip(placement.bundles, placement.owners, strict=True)
        for component in bundle.components
    }


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
