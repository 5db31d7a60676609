"""What happens to a VllmConfig that mentions KVPP: check it, choose the worker class.

Runs once in the process that parses the launch line, before weights are loaded, and again
wherever vLLM rebuilds a configuration (for a draft model, in a worker).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpp_connectors.config import Settings, read_settings
from kvpp_connectors.engine import profile
from kvpp_connectors.launch import launch_from_vllm
from kvpp_connectors.log import get_logger
from kvpp_connectors.problems import LaunchRefused, Problem, Severity
from kvpp_connectors.rules import OUR_WORKERS, PLATFORM_WORKERS, check

__all__ = ["KVPP_WORKERS", "configure"]

logger = get_logger(__name__)

KVPP_WORKERS = {
    "cpu": "kvpp_connectors.engine.cpu.KvppCpuWorker",
    "cuda": "kvpp_connectors.engine.cuda.KvppGpuWorker",
}
_PROFILE_WORKER = "kvpp_connectors.engine.cpu.CpuProfileWorker"


def configure(vllm_config: Any, platform_hook: Callable[[Any], None]) -> None:
    """Run the platform's hook on ``vllm_config`` with KVPP's additions around it.

    Raises:
        LaunchRefused: the launch breaks rules; lists all of them.
    """
    from vllm.platforms import current_platform

    settings, problems = read_settings(vllm_config.additional_config)
    parallel = vllm_config.parallel_config
    rebuilt = parallel.worker_cls.startswith(OUR_WORKERS)
    if vllm_config.model_config is not None and not rebuilt:
        # A switch that cannot be read was meant to be on: all problems are told at once.
        if settings.enabled or any(p.rule == "switch-is-boolean" for p in problems):
            problems += check(launch_from_vllm(vllm_config))
            problems += _check_platform(current_platform.device_type)
        _report(problems)
        _choose_worker(parallel, settings, current_platform.device_type)
    with_profile = settings.enabled or settings.options.cpu_profile
    if current_platform.device_type == "cpu" and with_profile:
        profile.apply(vllm_config, platform_hook)
    else:
        platform_hook(vllm_config)


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


def _report(problems: list[Problem]) -> None:
    if any(problem.severity is Severity.REFUSED for problem in problems):
        raise LaunchRefused(problems)
    for problem in problems:
        logger.warning("%s", problem)


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
