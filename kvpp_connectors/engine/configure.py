"""What becomes of a VllmConfig that mentions us: its worker class and its connectors' modules.

Runs in the process that parses the launch line, before weights are loaded, and again wherever vLLM
rebuilds a configuration (for a draft model, in a worker). An accepted configuration carries a mark
that rebuilt ones inherit; its worker class tells nothing, because a user may give that by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpp_connectors.engine.cpu import profile
from kvpp_connectors.engine.workers import PROFILE_WORKER, installed_workers
from kvpp_connectors.launch.mention import child_configs, has_our_connector
from kvpp_connectors.launch.modules import CONNECTOR_MODULES, MULTI_MODULE
from kvpp_connectors.launch.options import Settings, read_settings
from kvpp_connectors.launch.platforms import PLATFORM_WORKERS
from kvpp_connectors.launch.validate import validate
from kvpp_connectors.log import get_logger

__all__ = ["configure", "examine"]

logger = get_logger(__name__)

_ACCEPTED = "kvpp_accepted"  # on the device_config: vLLM hands it on as it is, never a new one


def examine(vllm_config: Any) -> None:
    """Check a launch as the user asked for it: vLLM resolves some of what is refused.

    Raises:
        LaunchRefused: the launch breaks rules; lists all problems.
    """
    if _is_new(vllm_config):
        validate(vllm_config).accepted()
        _name_modules(vllm_config.kv_transfer_config)


def configure(vllm_config: Any, platform_hook: Callable[[Any], None]) -> None:
    """Run the platform's hook on ``vllm_config`` with our additions around it.

    Raises:
        LaunchRefused: see `examine`; what vLLM made of the launch is checked here.
    """
    if _is_new(vllm_config):
        verdict = validate(vllm_config)
        launch = verdict.accepted()
        for problem in verdict.problems:
            logger.warning("%s", problem)
        settings = launch.settings
    else:
        settings, _ = read_settings(vllm_config.additional_config)
    with_profile = settings.options.cpu_profile or has_our_connector(vllm_config.kv_transfer_config)
    device_type = vllm_config.device_config.device_type
    if _is_new(vllm_config) and (settings.enabled or with_profile):
        _choose_worker(vllm_config.parallel_config, settings, device_type)
        setattr(vllm_config.device_config, _ACCEPTED, True)
    if device_type == "cpu" and (settings.enabled or with_profile):
        profile.apply(vllm_config, platform_hook)
    else:
        platform_hook(vllm_config)


def _is_new(vllm_config: Any) -> bool:
    """Whether this is a launch to check, not a configuration rebuilt from an accepted one."""
    return vllm_config.model_config is not None and not hasattr(
        vllm_config.device_config, _ACCEPTED
    )


def _name_modules(transfer: Any) -> None:
    """Our names mean our connectors: a module's path goes before any plug-in's registration.

    vllm-ascend registers some of the same names, and which plug-in comes last is chance.
    """
    if not has_our_connector(transfer):
        return
    for child in child_configs(transfer.kv_connector, transfer.kv_connector_extra_config):
        if child["kv_connector"] in CONNECTOR_MODULES:
            child.setdefault("kv_connector_module_path", CONNECTOR_MODULES[child["kv_connector"]])
    if transfer.kv_connector_module_path is None:
        module = CONNECTOR_MODULES.get(transfer.kv_connector, MULTI_MODULE)
        transfer.kv_connector_module_path = module


def _choose_worker(parallel: Any, settings: Settings, device_type: str) -> None:
    if settings.enabled:
        parallel.worker_cls = installed_workers()[device_type]
    elif device_type == "cpu" and parallel.worker_cls in PLATFORM_WORKERS:
        parallel.worker_cls = PROFILE_WORKER
    else:
        return
    logger.info("worker class: %s", parallel.worker_cls)
