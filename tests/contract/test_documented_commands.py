"""Commands and log messages that README and docs/ name are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import typer

from benchmarks.__main__ import app as benchmarks
from kvpp_connectors.cli.main import app as kvpp
from tests.contract.documents import DOCS, ROOT, table

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
# What stands for a value in a message: dots, with brackets or without, one capital, a store's name.
PLACEHOLDER = re.compile(r"[(\[]?\.\.\.[)\]]?|\b[A-Z]\b|\bmooncake\b")
LEAST = 8  # letters of a piece of a message that is looked for


def names(app: typer.Typer) -> set[str]:
    """The commands and groups of an application."""
    commands = [(one.name, one.callback) for one in app.registered_commands]
    named = {name or str(getattr(call, "__name__", "")) for name, call in commands}
    return named | {str(group.name) for group in app.registered_groups}


def test_every_make_target_is_there() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z][a-z0-9-]+)", code(TEXT))) <= targets


def test_every_command_is_there() -> None:
    text = code(TEXT)
    assert set(re.findall(r"\bkvpp ([a-z]+)", text)) <= names(kvpp)
    assert set(re.findall(r"python -m benchmarks ([a-z]\w+)", text)) <= names(benchmarks)


def test_every_message_of_the_runbook_is_the_codes() -> None:
    """Each piece between two values stands in a string of the code."""
    known = list(strings())
    cells = [row[0] for row in table("operating.md", "## Runbook")]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+ [^`]+)`", cell)]
    pieces = [piece.strip(" :;,/()") for message in messages for piece in split(message)]
    asked = [piece for piece in pieces if len(piece) >= LEAST]
    assert len(asked) > len(messages) > LEAST
    assert not [piece for piece in asked if not any(piece in text for text in known)]


def code(text: str) -> str:
    """What stands in backticks, or indented as a block, of Markdown."""
    blocks = re.findall(r"```(.*?)```", text, re.S) + re.findall(r"^ {4}.*$", text, re.M)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", text)])


def split(message: str) -> list[str]:
    """The pieces of a message between its values."""
    return PLACEHOLDER.split(message)


def strings() -> Iterator[str]:
    """Every string of the packages; an f-string gives the pieces between its values."""
    for folder in ("kvpp_core", "kvpp_connectors"):
        for file in sorted(Path(ROOT, folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.sub(r"%[.\d]*[sdfg]", "...", node.value)
