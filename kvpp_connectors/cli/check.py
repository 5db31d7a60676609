"""`kvpp check -- vllm serve ...`: what KVPP would refuse in a launch line, without starting it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from kvpp_connectors.launch.facts import Launch, launch_from_vllm, mode_name
from kvpp_connectors.launch.options import read_settings
from kvpp_connectors.launch.problems import LaunchRefused, Problem, Severity
from kvpp_connectors.launch.rules import check as check_rules

__all__ = ["Platform", "check", "check_line"]


class Platform(StrEnum):
    """Whose rules are applied, where it is not this machine's."""

    ASCEND = "ascend"


def check(
    line: Annotated[
        list[str], typer.Argument(help="The launch line, after --: vllm serve MODEL [OPTIONS]")
    ],
    platform: Annotated[
        Platform | None,
        typer.Option(help="Apply the rules of that platform. Default: this machine's."),
    ] = None,
) -> None:
    """Print what would be refused in a launch line, and what is warned of.

    vLLM parses the line and reads the model's configuration; no weights are loaded. Exit code 0:
    nothing is refused; 1: something is; 2: vLLM itself does not take the line.
    """
    console = Console(highlight=False)
    try:
        enabled, problems = check_line(line, platform)
    except _NotALaunch as error:
        console.print(str(error), markup=False)
        raise typer.Exit(2) from error
    refused = sum(problem.severity is Severity.REFUSED for problem in problems)
    for problem in problems:
        console.print(f"{problem.severity.value}: {problem}", markup=False, soft_wrap=True)
    if refused:
        console.print(f"{refused} refused.")
        raise typer.Exit(1)
    if enabled:
        console.print("KVPP takes this launch.")
    else:
        console.print("KVPP is off in this launch (no enable_kvpp in --additional-config).")


class _NotALaunch(Exception):
    """vLLM does not take the line."""


def check_line(line: Sequence[str], platform: Platform | None = None) -> tuple[bool, list[Problem]]:
    """Whether a launch line switches KVPP on, and every problem that it has."""
    arguments = _parse(line)
    given = arguments.additional_config  # text where it is no JSON, which vLLM refuses below
    settings, problems = read_settings(given if isinstance(given, dict) else {})
    try:
        config = arguments.create_engine_config()
    except LaunchRefused as error:
        return settings.enabled, list(error.problems)
    except (ValueError, OSError, RuntimeError) as error:
        refusal = _refusal_in(error)
        if refusal is not None:
            return settings.enabled, list(refusal.problems)
        raise _NotALaunch(f"vLLM does not take this launch: {error}") from error
    if settings.enabled:
        launch = launch_from_vllm(config)
        if platform is Platform.ASCEND:
            launch = _on_ascend(launch, arguments)
        problems += check_rules(launch)
    return settings.enabled, problems


def _on_ascend(launch: Launch, arguments: Any) -> Launch:
    """The launch on NPUs: this machine's platform may have changed what was asked of graphs."""
    compilation = arguments.compilation_config
    return replace(
        launch,
        device_type="npu",
        enforce_eager=bool(arguments.enforce_eager),
        cudagraph_mode=mode_name(compilation.cudagraph_mode),
    )


def _parse(line: Sequence[str]) -> Any:
    """The line as vLLM's AsyncEngineArgs."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = list(line)
    if words[:2] != ["vllm", "serve"]:
        raise _NotALaunch(f"expected 'vllm serve MODEL ...', got {' '.join(words[:3])!r}")
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve", exit_on_error=False))
    try:
        namespace = parser.parse_args(words[2:])
    except argparse.ArgumentError as error:
        raise _NotALaunch(f"vLLM cannot parse this line: {error}") from error
    except SystemExit as error:
        raise _NotALaunch("vLLM cannot parse this line; its own message stands above.") from error
    if getattr(namespace, "model_tag", None):
        namespace.model = namespace.model_tag
    return AsyncEngineArgs.from_cli_args(namespace)


def _refusal_in(error: BaseException) -> LaunchRefused | None:
    """Our refusal inside pydantic's ValidationError: VllmConfig is a pydantic dataclass."""
    details = error.errors() if hasattr(error, "errors") else ()
    causes = (detail.get("ctx", {}).get("error") for detail in details)
    return next((cause for cause in causes if isinstance(cause, LaunchRefused)), None)
