"""kvpp_core stands alone: torch and the standard library, never vLLM or the connectors."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvpp_core

ROOT = Path(kvpp_core.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MODULES = [
    ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for file in FILES
]
FORBIDDEN = ("vllm", "kvpp_connectors")
ALLOWED = {*sys.stdlib_module_names, "torch", "kvpp_core"}

IMPORT_ALL = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.process
def test_importing_every_module_imports_neither_vllm_nor_the_connectors() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps(MODULES)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=ROOT.parent,
    )
    loaded = json.loads(done.stdout)
    assert set(MODULES) <= set(loaded)
    assert [name for name in loaded if name.split(".")[0].startswith(FORBIDDEN)] == []


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def _mentioned(tree: ast.AST) -> Iterator[str]:
    """Names, attributes and strings of the code; docstrings are prose and may speak of vLLM."""
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
        ):
            yield node.value


@pytest.mark.parametrize("file", FILES, ids=MODULES)
def test_a_module_imports_torch_and_the_standard_library_only(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert {name.split(".")[0] for name in _imported(tree)} <= ALLOWED
    assert [
        text for text in _mentioned(tree) if any(word in text.lower() for word in FORBIDDEN)
    ] == []


def test_the_check_of_mentions_can_fail() -> None:
    tree = ast.parse('"""vLLM in prose."""\nimport vllm.config\nx = "kvpp_connectors.plugin"\n')
    assert list(_imported(tree)) == ["vllm.config"]
    assert list(_mentioned(tree)) == ["x", "kvpp_connectors.plugin"]
