"""KVPP on vLLM 0.23, as vllm-ascend 0.23 runs it: what differs from `KvppWorkerMixin` on 0.32.

The engine plans one KVCacheTensor per layer without offsets, and the model runner allocates each
layer's tensors by itself: there the KVPP layout is put in. A layer waits in its attention
implementation (`kvpp_connectors.engine.ascend.first_touch`).
"""

from __future__ import annotations

from math import lcm
from typing import Any

import torch

from kvpp_connectors.connector.caches import layer_name
from kvpp_connectors.engine.ascend.caches import (
    ALIGNMENT,
    aligned_buffer,
    components_of,
    raw_tensors,
)
from kvpp_connectors.engine.ascend.first_touch import hook_implementation
from kvpp_connectors.engine.placement import check_one_group, plan
from kvpp_connectors.engine.worker import KvppWorkerMixin
from kvpp_core.bundles import Component
from kvpp_core.errors import PlanError
from kvpp_core.layout import Placement, RankLayout

__all__ = ["KvppWorkerMixin023"]


class KvppWorkerMixin023(KvppWorkerMixin):
    """Mix in before a worker of vLLM 0.23 whose layers keep tuples of tensors."""

    _kvpp_memory: torch.Tensor

    def _kvpp_plan(self, specs: dict[str, Any], drafts: frozenset[str]) -> Placement:
        assert self._kvpp_group is not None
        options = self._kvpp_options
        # What aligning the buffer itself costs is counted, too.
        self._kvpp_options = options.model_copy(
            update={
                "alignment_bytes": lcm(options.alignment_bytes, ALIGNMENT),
                "reserve_bytes": options.reserve_bytes + ALIGNMENT,
            }
        )
        return plan(specs, drafts, self._kvpp_group, self._kvpp_options, self._kvpp_components)

    def _kvpp_components(self, name: str, spec: Any) -> tuple[Component, ...]:
        return components_of(name, spec, self._kvpp_layers()[name])

    def _kvpp_place(self, kv_cache_config: Any, layout: RankLayout) -> Any:
        check_one_group(kv_cache_config)
        runner = self.model_runner

        def allocate(kv_cache_config: Any) -> dict[str, tuple[torch.Tensor, ...]]:
            self._kvpp_memory = aligned_buffer(layout.size, self.device)
            tensors = raw_tensors(self._kvpp_memory, layout)
            (group,) = kv_cache_config.kv_cache_groups
            if odd := set(tensors) ^ set(group.layer_names):
                raise PlanError(
                    f"the engine planned {len(group.layer_names)} caches, this worker budgeted "
                    f"{len(tensors)}; they differ in {', '.join(sorted(odd)[:4])}"
                )
            runner.hybrid_with_attn_and_mamba = False  # what the replaced method leaves behind
            return tensors

        runner._allocate_kv_cache_tensors = allocate
        return kv_cache_config

    def _kvpp_buffer(self, layout: RankLayout) -> torch.Tensor:
        for name, tensors in raw_tensors(self._kvpp_memory, layout).items():
            bound = self._kvpp_layers()[name].kv_cache
            starts = [tensor.data_ptr() for tensor in bound]
            if starts != [tensor.data_ptr() for tensor in tensors]:
                raise PlanError(f"the cache of {name} does not lie where KVPP put it")
        return self._kvpp_memory

    def _kvpp_hook(self) -> None:
        layers = self._kvpp_layers()
        first: dict[str, str] = {}  # of each target layer, the component that stands for it
        for component in self._kvpp_layer_of:
            first.setdefault(layer_name(component), component)
        for name, component in first.items():
            hook_implementation(component, layers[name].impl, self._kvpp_acquire)
