"""One name of vLLM that this package relies on, and what is missing of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvpp_connectors.vllm_api.sources import Sources

__all__ = ["Hook", "Part", "members", "platform_hooks", "worker_hooks"]


class Part(StrEnum):
    """A part of vLLM that only some launches use."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"
    V1 = "Model Runner V1"
    V2 = "Model Runner V2"


@dataclass(frozen=True, slots=True)
class Hook:
    """One name of vLLM that KVPP relies on, with the parameters it counts on."""

    module: str
    attribute: str  # dotted below the module
    parameters: tuple[str, ...] = ()
    needed_by: tuple[Part, ...] = ()  # launches that use all of these; empty: every launch

    def missing(self, vllm: Sources) -> str | None:
        """What is missing, or None."""
        found = vllm.find(self.module, self.attribute)
        if found is None:
            return f"{self.module}.{self.attribute} is missing"
        known = vllm.parameters(found)
        absent = [name for name in self.parameters if name not in known]
        if absent:
            return (
                f"{self.module}.{self.attribute} has no parameter {', '.join(absent)}; "
                f"it has {', '.join(known) or 'none'}"
            )
        return None


def members(
    module: str, owner: str, names: str, needed_by: tuple[Part, ...] = ()
) -> tuple[Hook, ...]:
    """A row for each of the names, which are separated by blanks, of a class."""
    return tuple(Hook(module, f"{owner}.{name}", (), needed_by) for name in names.split())


def platform_hooks(module: str, owner: str, part: Part) -> tuple[Hook, ...]:
    """What the plug-in wraps of a platform."""
    hooks = ("apply_config_platform_defaults", "check_and_update_config")
    return tuple(Hook(module, f"{owner}.{name}", ("vllm_config",), (part,)) for name in hooks)


def worker_hooks(module: str, owner: str, part: Part) -> tuple[Hook, ...]:
    """What the mixin overrides and reads of the worker below it."""
    methods = "init_device determine_available_memory get_kv_cache_spec shutdown"
    attributes = (
        "vllm_config model_config parallel_config cache_config compilation_config model_runner "
        "device"
    )
    return (
        *members(module, owner, f"{methods} {attributes}", (part,)),
        Hook(module, f"{owner}.initialize_from_config", ("kv_cache_config",), (part,)),
        Hook(module, f"{owner}.execute_model", ("scheduler_output",), (part,)),
    )
