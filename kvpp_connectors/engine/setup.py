"""What happens to a VllmConfig that mentions KVPP: check it, choose the worker class.

Runs in the process that parses the launch line, before weights are loaded, and again wherever vLLM
rebuilds a configuration (for a draft model, in a worker). An accepted configuration carries a mark
that rebuilt ones inherit; its worker class tells nothing, because a user may give that by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpp_connectors.config import Settings, read_settings
from kvpp_connectors.engine import hooks, profile
from kvpp_connectors.launch import launch_from_vllm
from kvpp_connectors.log import get_logger
from kvpp_connectors.problems import LaunchRefused, Problem, Severity
from kvpp_connectors.rules import PLATFORM_WORKERS, check

__all__ = ["KVPP_WORKERS", "configure", "examine"]

logger = get_logger(__name__)

KVPP_WORKERS = {
    "cpu": "kvpp_connectors.engine.cpu.KvppCpuWorker",
    "cuda": "kvpp_connectors.engine.cuda.KvppGpuWorker",
}
_PROFILE_WORKER = "kvpp_connectors.engine.cpu.CpuProfileWorker"
_ACCEPTED = "kvpp_accepted"  # on the device_config: vLLM hands it on as it is, never a new one


def examine(vllm_config: Any) -> list[Problem]:
    """Check a launch as the user asked for it, or as vLLM resolved it; returns the warnings.

    Both are checked, because vLLM resolves some of what is refused to something else.

    Raises:
        LaunchRefused: the launch breaks rules; lists all problems.
        KvppError: this vLLM lacks something that KVPP hooks.
    """
    from vllm.platforms import current_platform

    if not _is_new(vllm_config):
        return []
    settings, problems = _settings(vllm_config)
    problems += _check_worker(vllm_config.parallel_config.worker_cls, settings)
    # A switch that cannot be read was meant to be on: all problems are told at once.
    if settings.enabled or any(p.rule == "switch-is-boolean" for p in problems):
        hooks.check_installed(vllm_config)
        problems += check(launch_from_vllm(vllm_config))
        problems += _check_platform(current_platform.device_type)
    if any(problem.severity is Severity.REFUSED for problem in problems):
        raise LaunchRefused(problems)
    return problems


def configure(vllm_config: Any, platform_hook: Callable[[Any], None]) -> None:
    """Run the platform's hook on ``vllm_config`` with KVPP's additions around it.

    Raises:
        LaunchRefused, KvppError: see `examine`.
    """
    from vllm.platforms import current_platform

    device_type = current_platform.device_type
    settings, _ = _settings(vllm_config)
    if _is_new(vllm_config):
        for problem in examine(vllm_config):
            logger.warning("%s", problem)
        _choose_worker(vllm_config.parallel_config, settings, device_type)
        setattr(vllm_config.device_config, _ACCEPTED, True)
    if device_type == "cpu" and (settings.enabled or settings.options.cpu_profile):
        profile.apply(vllm_config, platform_hook)
    else:
        platform_hook(vllm_config)


def _is_new(vllm_config: Any) -> bool:
    """Whether this is a launch to check, not a configuration rebuilt from an accepted one."""
    return vllm_config.model_config is not None and not hasattr(
        vllm_config.device_config, _ACCEPTED
    )


def _settings(vllm_config: Any) -> tuple[Settings, list[Problem]]:
    given = vllm_config.additional_config  # vLLM takes any object with a hash
    return read_settings(given if isinstance(given, dict) else {})


def _check_worker(worker_cls: str, settings: Settings) -> list[Problem]:
    if settings.enabled or worker_cls not in KVPP_WORKERS.values():
        return []
    return [
        Problem(
            rule="worker-class",
            option="--worker-cls",
            value=worker_cls,
            reason="This worker class runs KVPP, which is not switched on.",
            remedy="Leave --worker-cls out, and use --additional-config "
            "'{\"enable_kvpp\": true}' for KVPP.",
        )
    ]


def _check_platform(device_type: str) -> list[Problem]:
    if device_type in KVPP_WORKERS:
        return []
    return [
        Problem(
            rule="platform",
            option="platform",
            value=device_type,
            reason=f"KVPP has a worker for {' and '.join(KVPP_WORKERS)} only.",
            remedy="Switch KVPP off on this platform.",
        )
    ]


def _choose_worker(parallel: Any, settings: Settings, device_type: str) -> None:
    if settings.enabled:
        parallel.worker_cls = KVPP_WORKERS[device_type]
    elif (
        settings.options.cpu_profile
        and device_type == "cpu"
        and parallel.worker_cls in PLATFORM_WORKERS
    ):
        parallel.worker_cls = _PROFILE_WORKER
    else:
        return
    logger.info("worker class: %s", parallel.worker_cls)
