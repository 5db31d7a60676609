"""vLLM 0.23, as vllm-ascend 0.23 runs it: what differs from `Adapter032`.

The engine plans one KVCacheTensor per layer without offsets, and the model runner allocates each
layer's tensors by itself: there the KVPP layout is put in. A layer waits in its attention
implementation (`kvpp_connectors.engine.ascend.first_touch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import lcm
from typing import Any

import torch

from kvpp_connectors.connector.caches import layer_name
from kvpp_connectors.engine.adapter import Adapter032
from kvpp_connectors.engine.ascend.caches import (
    ALIGNMENT,
    aligned_buffer,
    components_of,
    raw_tensors,
)
from kvpp_connectors.engine.ascend.first_touch import hook_implementation
from kvpp_connectors.engine.placement import check_one_group, plan
from kvpp_connectors.launch.options import KvppOptions
from kvpp_core.bundles import Component
from kvpp_core.errors import PlanError
from kvpp_core.group import KvppGroup
from kvpp_core.layout import Placement, RankLayout

__all__ = ["Adapter023"]


class Adapter023(Adapter032):
    """vLLM 0.23, where a layer keeps a tuple of tensors."""

    _memory: torch.Tensor

    def options(self, options: KvppOptions) -> KvppOptions:
        """Caches are aligned; what aligning the buffer itself costs is counted, too."""
        return options.model_copy(
            update={
                "alignment_bytes": lcm(options.alignment_bytes, ALIGNMENT),
                "reserve_bytes": options.reserve_bytes + ALIGNMENT,
            }
        )

    def plan(
        self,
        specs: dict[str, Any],
        drafts: frozenset[str],
        group: KvppGroup,
        options: KvppOptions,
    ) -> Placement:
        """A layer's cache has a component for each of its tensors."""
        return plan(specs, drafts, group, options, self._components)

    def _components(self, name: str, spec: Any) -> tuple[Component, ...]:
        return components_of(name, spec, self.layers[name])

    def place(self, kv_cache_config: Any, layout: RankLayout) -> Any:
        """Put the layout into the model runner; the configuration stays."""
        check_one_group(kv_cache_config)
        runner, device = self._worker.model_runner, self._worker.device

        def allocate(kv_cache_config: Any) -> dict[str, tuple[torch.Tensor, ...]]:
            self._memory = aligned_buffer(layout.size, device)
            tensors = raw_tensors(self._memory, layout)
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

    def buffer(self, layout: RankLayout) -> torch.Tensor:
        """What `place` has let the model runner allocate."""
        for name, tensors in raw_tensors(self._memory, layout).items():
            bound = self.layers[name].kv_cache
            starts = [tensor.data_ptr() for tensor in bound]
            if starts != [tensor.data_ptr() for tensor in tensors]:
                raise PlanError(f"the cache of {name} does not lie where KVPP put it")
        return self._memory

    def hook_layers(self, components: Iterable[str], acquire: Callable[[str], None]) -> None:
        """A layer is acquired by the first of its components."""
        first: dict[str, str] = {}  # of each target layer, the component that stands for it
        for component in components:
            first.setdefault(layer_name(component), component)
        for name, component in first.items():
            hook_implementation(component, self.layers[name].impl, acquire)
