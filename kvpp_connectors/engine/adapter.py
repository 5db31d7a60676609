"""What KVPP does differently by version of vLLM: an adapter for each, chosen by the worker class.

Here stands the contract, and vLLM 0.32's. vLLM 0.23's, as vllm-ascend runs it, is
`kvpp_connectors.engine.ascend.adapter_v023`.

On 0.32 a layer is acquired in ``MLAAttention.prepare_kv_cache_update``: vLLM calls it on every
path, eager or compiled, before the layer's first cache access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from kvpp_connectors.engine import placement
from kvpp_connectors.launch.options import KvppOptions
from kvpp_core.group import KvppGroup
from kvpp_core.layout import Placement, RankLayout

__all__ = ["Adapter032", "VllmAdapter", "draft_cache_names"]


class VllmAdapter(Protocol):
    """What a worker needs of its vLLM. One for each worker, made once it has its device."""

    def __init__(self, worker: Any) -> None:
        """``worker``: vLLM's; its model runner is read when a method is called."""

    @property
    def layers(self) -> dict[str, Any]:
        """The model's attention layers by name, drafts included."""

    def options(self, options: KvppOptions) -> KvppOptions:
        """The user's options, with what this version's way of allocating adds to them."""

    def plan(
        self,
        specs: dict[str, Any],
        drafts: frozenset[str],
        group: KvppGroup,
        options: KvppOptions,
    ) -> Placement:
        """Who owns what, from the worker's cache specifications.

        Raises:
            PlanError: the caches cannot be placed.
        """

    def place(self, kv_cache_config: Any, layout: RankLayout) -> Any:
        """The KVCacheConfig by which vLLM allocates ``layout``.

        Raises:
            PlanError: the engine planned other caches than this worker budgeted.
        """

    def buffer(self, layout: RankLayout) -> torch.Tensor:
        """The KV memory that vLLM allocated: int8 (layout.size,).

        Raises:
            PlanError: a layer's cache does not lie where ``layout`` says.
        """

    def hook_layers(self, components: Iterable[str], acquire: Callable[[str], None]) -> None:
        """Let each target layer call ``acquire(component)`` before it first touches its cache."""


class Adapter032:
    """vLLM 0.32: one buffer, each layer's cache at an offset."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def layers(self) -> dict[str, Any]:
        layers: dict[str, Any] = self._worker.compilation_config.static_forward_context
        return layers

    def options(self, options: KvppOptions) -> KvppOptions:
        """As they are."""
        return options

    def plan(
        self,
        specs: dict[str, Any],
        drafts: frozenset[str],
        group: KvppGroup,
        options: KvppOptions,
    ) -> Placement:
        """A layer's cache is one tensor."""
        return placement.plan(specs, drafts, group, options)

    def place(self, kv_cache_config: Any, layout: RankLayout) -> Any:
        """One KVCacheTensor a layer, with its own offset."""
        return placement.place(kv_cache_config, layout)

    def buffer(self, layout: RankLayout) -> torch.Tensor:
        """The storage under the layers' views."""
        layers = self.layers
        caches = {name: layers[name].kv_cache for name in layout.components}
        return placement.backing_buffer(caches, layout)

    def hook_layers(self, components: Iterable[str], acquire: Callable[[str], None]) -> None:
        """A component is a layer of vLLM's here. The method is replaced on the instance, where
        vLLM looks it up on the direct path and in the custom op alike.
        """
        layers = self.layers
        for name in components:
            layer = layers[name]
            layer.prepare_kv_cache_update = _acquiring(layer.prepare_kv_cache_update, name, acquire)


def _acquiring(
    original: Callable[[Any], None], name: str, acquire: Callable[[str], None]
) -> Callable[[Any], None]:
    def prepare_kv_cache_update(attn_metadata: Any) -> None:
        acquire(name)
        original(attn_metadata)

    return prepare_kv_cache_update


def draft_cache_names(runner: Any, layers: dict[str, Any]) -> frozenset[str]:
    """Names of the caches that belong to the draft model, found by asking the proposer.

    Layer indices say nothing: an MTP layer looks like one more target layer.
    """
    proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model = getattr(proposer, "model", None)
    if model is not None and hasattr(model, "unwrap"):  # wrapped, to be captured as graphs
        model = model.unwrap()
    if not isinstance(model, torch.nn.Module):
        return frozenset()
    modules = set(map(id, model.modules()))
    target = set(map(id, runner.get_model().modules()))
    return frozenset(
        name for name, layer in layers.items() if id(layer) in modules and id(layer) not in target
    )
