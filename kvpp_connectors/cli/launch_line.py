"""A launch line of vLLM as it stands in a shell or a script: its environment and its arguments.

No shell reads it: variables, quotes and line breaks are already resolved in the words.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

__all__ = ["LaunchLine", "NotALaunch", "environment", "error_text", "parse", "read_line"]

SERVER_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
)
CLI_MODULE = "vllm.entrypoints.cli.main"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")


class NotALaunch(Exception):
    """This is no launch line, or vLLM itself does not take it."""


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """The variables that a line sets, and the arguments that it gives vLLM."""

    variables: Mapping[str, str]
    arguments: tuple[str, ...]
    serve: bool  # `vllm serve`, which takes the model as a positional argument


def read_line(words: Sequence[str]) -> LaunchLine:
    """Tell a launch line's parts apart.

    Raises:
        NotALaunch: it starts something else.
    """
    rest = [*words[1:]] if words[:1] == ["env"] else [*words]
    variables: dict[str, str] = {}
    while rest and (assignment := _ASSIGNMENT.fullmatch(rest[0])):
        variables[assignment[1]] = assignment[2]
        del rest[0]
    program = PurePath(rest[0]).name if rest else ""
    if program == "vllm" and rest[1:2] == ["serve"]:
        return LaunchLine(variables, tuple(rest[2:]), serve=True)
    if _PYTHON.fullmatch(program) and "-m" in rest:
        module, *arguments = rest[rest.index("-m") + 1 :] or [""]
        if module in SERVER_MODULES:
            return LaunchLine(variables, tuple(arguments), serve=False)
        if module == CLI_MODULE and arguments[:1] == ["serve"]:
            return LaunchLine(variables, tuple(arguments[1:]), serve=True)
    raise NotALaunch(
        f"expected 'vllm serve MODEL ...' or 'python -m {SERVER_MODULES[0]} ...', "
        f"got {' '.join(words[:3])!r}"
    )


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """``os.environ`` with these variables; after it as it was before, whatever vLLM sets.

    Raises:
        NotALaunch: no process can have them.
    """
    before = dict(os.environ)
    try:
        try:
            os.environ.update(variables)
        except ValueError as error:  # a null byte
            raise NotALaunch(f"a variable of the line cannot be set: {error}") from error
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def parse(line: LaunchLine) -> Any:
    """The line as vLLM's AsyncEngineArgs. A --config file is read as vLLM reads it.

    Raises:
        NotALaunch: vLLM's parser does not take it.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm", exit_on_error=False)
    words = [*line.arguments]
    if line.serve:
        serve = parser.add_subparsers(dest="subparser").add_parser("serve", exit_on_error=False)
        make_arg_parser(serve)
        words = ["serve", *words]
    else:
        make_arg_parser(parser)
    try:
        namespace = parser.parse_args(words)
        validate_parsed_serve_args(namespace)
        if getattr(namespace, "model_tag", None):
            namespace.model = namespace.model_tag
        if not isinstance(namespace.speculative_config, dict | None):
            raise NotALaunch(
                f"--speculative-config = {namespace.speculative_config!r}: vLLM takes a JSON object"
            )
        return AsyncEngineArgs.from_cli_args(namespace)
    except NotALaunch:
        raise
    except argparse.ArgumentError as error:
        raise NotALaunch(f"vLLM cannot parse this line: {error}") from error
    except SystemExit as error:
        raise NotALaunch("vLLM cannot parse this line; its own message stands above.") from error
    except Exception as error:  # vLLM's code, and its readers of JSON and YAML: whatever they raise
        said = error_text(error) + _place(error, words)
        raise NotALaunch(f"vLLM cannot parse this line: {said}") from error


def _place(error: BaseException, words: Sequence[str]) -> str:
    """The argument that a KeyError is about: it names no option."""
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    found = next((word for word in words if isinstance(key, str) and key in word), None)
    return "" if found is None else f", in {found}"


def error_text(error: BaseException) -> str:
    """An error as a sentence: its class says something where its text alone may not."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
