"""May this launch run? The one composition of all checks.

The plug-in asks before vLLM resolves a configuration and after, each worker once more before it
takes its device, and `kvpp check` asks without starting anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvpp_connectors.connector.names import P2P, POOL
from kvpp_connectors.connector.options import OptionsError
from kvpp_connectors.launch.connectors import Connector
from kvpp_connectors.launch.facts import Launch, launch_from_vllm
from kvpp_connectors.launch.mention import mentions_us
from kvpp_connectors.launch.options import Settings
from kvpp_connectors.launch.platforms import Platform, installed_devices
from kvpp_connectors.launch.problems import LaunchRefused, Problem, Severity, refusals_first
from kvpp_connectors.launch.rules import check
from kvpp_connectors.p2p.options import read_key, read_options
from kvpp_connectors.pool.options import read_pool_options
from kvpp_connectors.pool.store.memcache_settings import memcache_config_file
from kvpp_connectors.pool.store.mooncake_settings import read_mooncake_settings
from kvpp_connectors.vllm_api.check import check_installed, vllm_version
from kvpp_core.errors import KvppError

__all__ = ["Verdict", "settings_problems", "validate"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A launch and every problem that it has, refusals first."""

    launch: Launch
    problems: tuple[Problem, ...]

    @property
    def refused(self) -> bool:
        """Whether it may not run."""
        return any(problem.severity is Severity.REFUSED for problem in self.problems)

    def accepted(self) -> Launch:
        """The launch.

        Raises:
            LaunchRefused: it may not run; lists all problems.
        """
        if self.refused:
            raise LaunchRefused(self.problems)
        return self.launch


def validate(vllm_config: Any, platform: Platform | None = None) -> Verdict:
    """Check a launch as the user asked for it, or as vLLM resolved it.

    Of a launch that does not mention this package nothing is read.

    Args:
        vllm_config: before or after vLLM's platform hook; it is not changed.
        platform: whose rules are applied; those of the installed vLLM's if left out.
    """
    if not mentions_us(vllm_config):
        return Verdict(Launch(settings=Settings()), ())
    launch = launch_from_vllm(vllm_config, platform.device_type if platform else None)
    problems = [*launch.unreadable, *check(launch)]
    for connector in launch.connectors:
        if not connector.unreadable:
            problems += settings_problems(connector)
    if launch.kvpp and platform is None:
        problems += _installation_problems(vllm_config, launch.device_type)
    return Verdict(launch, tuple(refusals_first(problems)))


def settings_problems(connector: Connector) -> list[Problem]:
    """What is wrong with one connector's own settings, and with what they refer to."""
    try:
        _read_settings(connector)
    except OptionsError as error:
        return [Problem.of(complaint, "connector-settings") for complaint in error.complaints]
    return []


def _read_settings(connector: Connector) -> None:
    path = f"{connector.path}.kv_connector_extra_config"
    if connector.name == P2P:
        read_key(read_options(connector.extra, path), path)
    elif connector.name == POOL:
        if read_pool_options(connector.extra, path).backend == "mooncake":
            read_mooncake_settings(connector.extra, os.environ, path)
        else:
            memcache_config_file(os.environ)


def _installation_problems(vllm_config: Any, device_type: str) -> Iterator[Problem]:
    """Whether the installed vLLM, and its platform, are ones that KVPP runs in."""
    devices = installed_devices()
    if device_type not in devices:
        yield Problem(
            rule="platform",
            option="platform",
            value=device_type,
            reason=f"On {vllm_version()} KVPP has a worker for {' and '.join(devices)} only.",
            remedy="Switch KVPP off on this platform.",
        )
        return
    try:
        check_installed(vllm_config)
    except KvppError as error:
        yield Problem(
            rule="hooks",
            option="vllm",
            value=vllm_version(),
            reason=f"{error}.",
            remedy="Install a version that this release names, or switch KVPP off.",
        )
