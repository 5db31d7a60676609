"""vLLM's entry point to this package. Loaded in every vLLM process, so it imports nothing heavy.

It wraps the platform's ``check_and_update_config``, through which every VllmConfig passes. For a
launch that does not ask for us the wrapper calls the original and nothing else.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

__all__ = ["register"]

_MARK = "__kvpp_wrapped__"


def register() -> None:
    """Wrap the platform's configuration hook. May be called any number of times."""
    from vllm.platforms import current_platform

    if current_platform.device_type == "npu" and find_spec("vllm_ascend.distributed.kvpp"):
        return  # vllm-ascend >= 0.28 has a KVPP of its own under the same switch
    platform = type(current_platform)
    original = platform.check_and_update_config
    if getattr(original, _MARK, False):
        return

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        if _concerns_us(vllm_config.additional_config):
            from kvpp_connectors.engine.setup import configure

            configure(vllm_config, original)
        else:
            original(vllm_config)

    setattr(check_and_update_config, _MARK, True)
    platform.check_and_update_config = classmethod(check_and_update_config)


def _concerns_us(additional_config: object) -> bool:
    """Whether a key is ours or may be a misspelt one of ours; who reads it says which."""
    if not isinstance(additional_config, dict):
        return False
    return any(
        "kvp" in key or (key.startswith("enable_k") and set(key) <= set("enable_kvpp"))
        for key in map(str.lower, map(str, additional_config))
    )
