"""vLLM's entry point to this package. Loaded in every vLLM process, so it imports nothing heavy.

It wraps two hooks of the platform that every VllmConfig passes: ``apply_config_platform_defaults``,
where the launch is still as the user asked for it, and ``check_and_update_config``, where vLLM has
resolved it. For a launch that does not mention us the wrappers call the originals and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvpp_connectors.launch.mention import mentions_us
from kvpp_connectors.launch.modules import CONNECTOR_MODULES

__all__ = ["has_native_kvpp", "register"]

_MARK = "__kvpp_wrapped__"


def register() -> None:
    """Wrap the platform's configuration hooks. May be called any number of times."""
    from vllm.platforms import current_platform

    if current_platform.device_type == "npu" and has_native_kvpp():
        _say_who_serves()
        return
    platform = type(current_platform)
    _wrap(platform, "apply_config_platform_defaults", _examine)
    _wrap(platform, "check_and_update_config", _configure)


def has_native_kvpp() -> bool:
    """Whether the installed vllm-ascend has a KVPP of its own under the same switch (>= 0.28).

    Its files are looked at, not imported: importing vllm-ascend from a plug-in goes in circles.
    """
    spec = find_spec("vllm_ascend")
    if spec is None or spec.origin is None:
        return False
    config = Path(spec.origin).with_name("ascend_config.py")
    return config.is_file() and "enable_kvpp" in config.read_text(encoding="utf-8")


def _say_who_serves() -> None:
    from kvpp_connectors.log import get_logger

    get_logger(__name__).info(
        "this vllm-ascend has a KVPP of its own: kvpp-connectors leaves the engine alone. Its "
        "connectors serve engines without KVPP where kv_transfer_config names them: %s",
        ", ".join(f'"kv_connector_module_path": "{path}"' for path in CONNECTOR_MODULES.values()),
    )


def _wrap(platform: Any, name: str, ours: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Let ``ours`` run the platform's hook where a configuration mentions us."""
    original = getattr(platform, name)
    if getattr(original, _MARK, False):
        return

    def hook(cls: Any, vllm_config: Any) -> None:
        if mentions_us(vllm_config):
            ours(vllm_config, original)
        else:
            original(vllm_config)

    setattr(hook, _MARK, True)
    setattr(platform, name, classmethod(hook))


def _examine(vllm_config: Any, original: Callable[[Any], None]) -> None:
    from kvpp_connectors.engine.configure import examine

    examine(vllm_config)
    original(vllm_config)


def _configure(vllm_config: Any, original: Callable[[Any], None]) -> None:
    from kvpp_connectors.engine.configure import configure

    configure(vllm_config, original)
