"""What happens to a VllmConfig that mentions KVPP: check it, choose the worker class.

Runs in the process that parses the launch line, before weights are loaded, and again wherever vLLM
rebuilds a configuration (for a draft model, in a worker). An accepted configuration carries a mark
that rebuilt ones inherit; its worker class tells nothing, because a user may give that by hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from kvpp_connectors.connector.names import CONNECTOR_MODULES, MULTI_MODULE, P2P, POOL
from kvpp_connectors.engine.cpu import profile
from kvpp_connectors.launch.composition import check_composition
from kvpp_connectors.launch.facts import launch_from_vllm
from kvpp_connectors.launch.options import Settings, read_settings
from kvpp_connectors.launch.problems import LaunchRefused, Problem, Severity
from kvpp_connectors.launch.rules import PLATFORM_WORKERS, check
from kvpp_connectors.log import get_logger
from kvpp_connectors.plugin import children_of, connectors_concern_us
from kvpp_connectors.pool.options import loads_blocks
from kvpp_connectors.vllm_api.check import check_installed, is_v023, vllm_version
from kvpp_core.errors import KvppError

__all__ = [
    "KVPP_WORKERS",
    "KVPP_WORKERS_023",
    "configure",
    "examine",
    "examine_resolved",
    "installed_workers",
]

logger = get_logger(__name__)

KVPP_WORKERS = {
    "cpu": "kvpp_connectors.engine.cpu.worker.KvppCpuWorker",
    "cuda": "kvpp_connectors.engine.cuda.KvppGpuWorker",
}
KVPP_WORKERS_023 = {"npu": "kvpp_connectors.engine.ascend.worker.KvppNpuWorker"}  # on vLLM 0.23
_PROFILE_WORKER = "kvpp_connectors.engine.cpu.worker.CpuProfileWorker"
_FAILS_REQUESTS = Problem(
    rule="failed-loads-end-requests",
    option="kv_transfer_config.kv_load_failure_policy",
    value="fail",
    reason="vLLM's default: a request whose blocks do not come from a peer or a pool that had them "
    "ends with an error.",
    remedy='Set "recompute" to have them computed here, or leave it if that must not happen.',
    severity=Severity.WARNING,
)
_ACCEPTED = "kvpp_accepted"  # on the device_config: vLLM hands it on as it is, never a new one


def installed_workers() -> Mapping[str, str]:
    """KVPP's worker class for each platform of the installed vLLM."""
    return KVPP_WORKERS_023 if is_v023() else KVPP_WORKERS


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
    _name_connector(vllm_config.kv_transfer_config)
    settings, problems = _settings(vllm_config)
    problems += _check_worker(vllm_config.parallel_config.worker_cls, settings)
    problems += _check_connector(vllm_config.kv_transfer_config)
    # A switch that cannot be read was meant to be on: all problems are told at once.
    if settings.enabled or any(p.rule == "switch-is-boolean" for p in problems):
        check_installed(vllm_config)
        problems = _each_once(problems, check(launch_from_vllm(vllm_config)))
        problems += _check_platform(current_platform.device_type)
    problems.sort(key=lambda problem: problem.severity is not Severity.REFUSED)
    if any(problem.severity is Severity.REFUSED for problem in problems):
        raise LaunchRefused(problems)
    return problems


def examine_resolved(vllm_config: Any) -> None:
    """Check a launch once more in its worker: vLLM chooses graph modes after its platform's hook.

    Raises:
        LaunchRefused: what vLLM made of the launch breaks rules.
    """
    launch = replace(launch_from_vllm(vllm_config), connector=None)  # those were told before
    problems = [p for p in check(launch) if p.severity is Severity.REFUSED]
    if problems:
        raise LaunchRefused(problems)


def configure(vllm_config: Any, platform_hook: Callable[[Any], None]) -> None:
    """Run the platform's hook on ``vllm_config`` with KVPP's additions around it.

    Raises:
        LaunchRefused, KvppError: see `examine`.
    """
    from vllm.platforms import current_platform

    device_type = current_platform.device_type
    settings, _ = _settings(vllm_config)
    with_profile = settings.options.cpu_profile or connectors_concern_us(
        vllm_config.kv_transfer_config
    )
    if _is_new(vllm_config):
        for problem in examine(vllm_config):
            logger.warning("%s", problem)
        _choose_worker(vllm_config.parallel_config, settings, device_type, with_profile)
        setattr(vllm_config.device_config, _ACCEPTED, True)
    if device_type == "cpu" and (settings.enabled or with_profile):
        profile.apply(vllm_config, platform_hook)
    else:
        platform_hook(vllm_config)


def _each_once(settings: list[Problem], rules: list[Problem]) -> list[Problem]:
    """Both, without what a connector says of its own settings where a rule says it better."""
    told = tuple(problem.option for problem in rules)
    return [
        *(p for p in settings if not any(option.startswith(p.option) for option in told)),
        *rules,
    ]


def _is_new(vllm_config: Any) -> bool:
    """Whether this is a launch to check, not a configuration rebuilt from an accepted one."""
    return vllm_config.model_config is not None and not hasattr(
        vllm_config.device_config, _ACCEPTED
    )


def _settings(vllm_config: Any) -> tuple[Settings, list[Problem]]:
    given = vllm_config.additional_config  # vLLM takes any object with a hash
    return read_settings(given if isinstance(given, dict) else {})


def _check_worker(worker_cls: str, settings: Settings) -> list[Problem]:
    if settings.enabled or worker_cls not in installed_workers().values():
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


def _name_connector(transfer: Any) -> None:
    """Our names mean our connectors: a module's path goes before any plug-in's registration.

    vllm-ascend registers some of the same names, and which plug-in comes last is chance.
    """
    if not connectors_concern_us(transfer):
        return
    for _, child in children_of(transfer):
        if isinstance(child, dict) and child.get("kv_connector") in CONNECTOR_MODULES:
            child.setdefault("kv_connector_module_path", CONNECTOR_MODULES[child["kv_connector"]])
    if transfer.kv_connector_module_path is None:
        transfer.kv_connector_module_path = CONNECTOR_MODULES.get(
            transfer.kv_connector, MULTI_MODULE
        )


def _check_connector(transfer: Any) -> list[Problem]:
    """Our connectors' own settings and composition, whether KVPP is on or not."""
    if not connectors_concern_us(transfer):
        return []
    if transfer.kv_connector in CONNECTOR_MODULES:
        extra = transfer.kv_connector_extra_config
        problems = _check_settings(transfer.kv_connector, extra, "kv_transfer_config")
        loading = _loads(transfer.kv_connector, transfer.kv_role, extra)
    else:
        known = tuple(field.name for field in fields(transfer))
        problems = check_composition(transfer, known, _check_settings)
        loading = any(
            _loads(*map(child.get, ("kv_connector", "kv_role", "kv_connector_extra_config")))
            for _, child in children_of(transfer)
            if isinstance(child, Mapping)
        )
    if loading and transfer.kv_load_failure_policy == "fail":
        problems.append(_FAILS_REQUESTS)
    return problems


def _loads(name: object, role: object, extra: object) -> bool:
    """Whether a connector takes blocks from elsewhere into this engine."""
    if name == POOL:
        given = extra if isinstance(extra, Mapping) else {}
        return loads_blocks(role, given.get("consumer_is_to_load"))
    return name == P2P and role != "kv_producer"


def _check_settings(name: str, extra: Any, path: str) -> list[Problem]:
    """What is wrong with one connector's extra config."""
    try:
        _read_settings_of(name, extra)
    except KvppError as error:
        return [
            Problem(
                rule="connector-settings",
                option=f"{path}.kv_connector_extra_config",
                value=str(extra),
                reason=f"{error}.",
                remedy="Correct or remove it.",
            )
        ]
    return []


def _read_settings_of(name: str, extra: Any) -> None:
    if not isinstance(extra, Mapping):
        raise KvppError(f"{extra!r} is no JSON object")
    if name == P2P:
        from kvpp_connectors.p2p.options import read_key, read_options

        read_key(read_options(extra))
    elif name == POOL:
        from kvpp_connectors.pool.options import read_pool_options
        from kvpp_connectors.pool.store.mooncake_settings import read_mooncake_settings

        if read_pool_options(extra).backend == "mooncake":
            read_mooncake_settings(extra, os.environ)


def _check_platform(device_type: str) -> list[Problem]:
    workers = installed_workers()
    if device_type in workers:
        return []
    return [
        Problem(
            rule="platform",
            option="platform",
            value=device_type,
            reason=f"On {vllm_version()} KVPP has a worker for {' and '.join(workers)} only.",
            remedy="Switch KVPP off on this platform.",
        )
    ]


def _choose_worker(parallel: Any, settings: Settings, device_type: str, with_profile: bool) -> None:
    if settings.enabled:
        parallel.worker_cls = installed_workers()[device_type]
    elif with_profile and device_type == "cpu" and parallel.worker_cls in PLATFORM_WORKERS:
        parallel.worker_cls = _PROFILE_WORKER
    else:
        return
    logger.info("worker class: %s", parallel.worker_cls)
