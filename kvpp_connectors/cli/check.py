"""`kvpp check -- vllm serve ...`: what KVPP would refuse in a launch line, without starting it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from kvpp_connectors.cli.launch_line import NotALaunch, environment, error_text, parse, read_line
from kvpp_connectors.launch.platforms import Platform
from kvpp_connectors.launch.problems import LaunchRefused, Problem, Severity
from kvpp_connectors.launch.validate import Verdict, validate

__all__ = ["Answer", "check", "check_line"]


def check(
    line: Annotated[
        list[str],
        typer.Argument(
            help="The launch line, after --: vllm serve MODEL [OPTIONS], or python -m "
            "vllm.entrypoints.openai.api_server [OPTIONS]; NAME=VALUE may stand before it."
        ),
    ],
    platform: Annotated[
        Platform | None,
        typer.Option(
            help="Apply the rules of that platform, on any machine. Default: this machine's."
        ),
    ] = None,
) -> None:
    """Print what would be refused in a launch line, and what is warned of.

    vLLM parses the line and reads the model's configuration; no weights are loaded. The problems
    are those that the launch itself would log. For another platform than this machine's the line is
    judged as it is written, with vLLM's default graph mode there; what vLLM itself would refuse on
    that platform is not known here.

    Exit code 0: nothing is refused; 1: something is; 2: this is no launch line, or vLLM itself
    does not take it.
    """
    console = Console(highlight=False)
    try:
        answer = check_line(line, platform)
    except NotALaunch as error:
        console.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    for problem in answer.problems:
        console.print(f"{problem.severity.value}: {problem}", markup=False, soft_wrap=True)
    judged = f"Judged for {answer.platform} ({answer.why})."
    if answer.refused:
        console.print(f"{answer.refused} refused. {judged}", soft_wrap=True)
        raise typer.Exit(1)
    if answer.enabled:
        console.print(f"KVPP takes this launch. {judged}", soft_wrap=True)
    else:
        off = "KVPP is off in this launch (no enable_kvpp in --additional-config)."
        console.print(f"{off} {judged}", soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """What is to be said of a launch line, and who judged."""

    platform: str
    why: str
    enabled: bool
    problems: tuple[Problem, ...]

    @property
    def refused(self) -> int:
        """How many problems refuse the launch."""
        return sum(problem.severity is Severity.REFUSED for problem in self.problems)


def check_line(words: Sequence[str], platform: Platform | None = None) -> Answer:
    """What the launch of these words would be told.

    Args:
        words: the launch line.
        platform: whose rules are applied; this machine's if left out.

    Raises:
        NotALaunch: it is none, or vLLM itself does not take it.
    """
    line = read_line(words)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with environment(line.variables):
        arguments = parse(line)
        from vllm.platforms import current_platform

        here = current_platform.device_type
        if platform is not None and platform.device_type != here:
            answer = _judge(lambda: validate(_as_asked(arguments), platform))
            why = f"given by --platform; this machine is {here}"
        else:
            answer = _judge(lambda: validate(_as_resolved(arguments)))
            why = "given by --platform" if platform else "detected here"
    judge = next((p.value for p in Platform if p.device_type == here), here)
    enabled = isinstance(answer, Verdict) and answer.launch.settings.enabled
    return Answer(platform or judge, why, enabled, tuple(answer.problems))


def _judge(validated: Callable[[], Verdict]) -> Verdict | LaunchRefused:
    """The verdict, or the plug-in's refusal out of vLLM's own error.

    Raises:
        NotALaunch: vLLM does not take the launch.
    """
    try:
        return validated()
    except Exception as error:  # vLLM's code, and modules that the line names: whatever they raise
        refusal = _refusal_in(error)
        if refusal is not None:
            return refusal
        raise NotALaunch(f"vLLM does not take this launch: {error_text(error)}") from error


def _as_resolved(arguments: Any) -> Any:
    """The VllmConfig of the launch here; checked before vLLM resolves it and after."""
    from kvpp_connectors.plugin import register

    register()
    return arguments.create_engine_config()


def _as_asked(arguments: Any) -> Any:
    """The VllmConfig before the platform of this machine changes it."""
    with _stopped_when_asked():
        try:
            return arguments.create_engine_config()
        except _AsAsked as stop:
            return stop.vllm_config


class _AsAsked(BaseException):
    """Carries a VllmConfig out of vLLM."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        super().__init__()


@contextmanager
def _stopped_when_asked() -> Iterator[None]:
    """Let vLLM stop where a configuration is still as the user asked for it."""
    from vllm.platforms import current_platform

    platform, name = type(current_platform), "apply_config_platform_defaults"
    before = platform.__dict__.get(name)

    def stop(cls: Any, vllm_config: Any) -> None:
        if vllm_config.model_config is not None:
            raise _AsAsked(vllm_config)

    setattr(platform, name, classmethod(stop))
    try:
        yield
    finally:
        if before is None:
            delattr(platform, name)
        else:
            setattr(platform, name, before)


def _refusal_in(error: BaseException) -> LaunchRefused | None:
    """Our refusal inside pydantic's ValidationError: VllmConfig is a pydantic dataclass."""
    if isinstance(error, LaunchRefused):
        return error
    details = error.errors() if hasattr(error, "errors") else ()
    causes = (detail.get("ctx", {}).get("error") for detail in details)
    return next((cause for cause in causes if isinstance(cause, LaunchRefused)), None)
