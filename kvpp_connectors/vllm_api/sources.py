"""vLLM's source, read and not imported: which names a class has and what a call takes.

Reading finds what importing cannot: the attributes that objects give themselves in their methods,
and the classes of a runner, a platform or a version that cannot be imported here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kvpp_core.errors import KvppError

__all__ = ["Definition", "Sources"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """Where a name gets its meaning."""

    module: str
    node: ast.stmt | ast.Attribute  # an Attribute: a method says ``self.name = ...``


class Sources:
    """The Python files of the package vllm in the folder ``root``, and of packages beside it.

    ``version`` says whose they are, in errors. ``elsewhere`` gives the folders of packages that do
    not lie in ``root``. Bases and re-exports are followed inside these packages only.
    """

    def __init__(self, root: Path, version: str, elsewhere: Mapping[str, Path] = {}) -> None:
        self.root = root
        self.version = version
        self.elsewhere = elsewhere
        self._modules: dict[str, dict[str, Definition]] = {}
        self._classes: dict[tuple[str, str], dict[str, Definition]] = {}

    @classmethod
    def installed(cls, version: str) -> Sources:
        """Those of the vLLM that this process would import.

        Raises:
            KvppError: there is none, or its source does not lie in files.
        """
        folder = _folder_of("vllm")
        if folder is None:
            raise KvppError("there is no vLLM in this Python environment")
        ascend = _folder_of("vllm_ascend")  # each may be installed from a checkout of its own
        return cls(folder, version, {} if ascend is None else {"vllm_ascend": ascend})

    def text(self, module: str) -> str | None:
        """The source of a module by its dotted name; None if there is none."""
        path = self._path(module)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text(encoding="utf-8")
        return None

    def find(self, module: str, name: str) -> Definition | None:
        """The definition of a name, dotted below the module; None if it is not there."""
        first, *rest = name.split(".")
        found = self._followed(self._names(module).get(first))
        for part in rest:
            found = self._followed(self.members(found).get(part)) if found is not None else None
        return found

    def members(self, definition: Definition) -> dict[str, Definition]:
        """The names of a class, of its bases, and what their methods set on ``self``."""
        module, node = definition
        if not isinstance(node, ast.ClassDef):
            return {}
        if (module, node.name) not in self._classes:
            self._classes[module, node.name] = members = _first_of_each(node.body, module)
            for attribute in _set_on_self(node):
                members.setdefault(attribute.attr, Definition(module, attribute))
            for base in node.bases:
                for name, found in self._members_of_base(base, module).items():
                    members.setdefault(name, found)
        return self._classes[module, node.name]

    def parameters(self, definition: Definition) -> tuple[str, ...]:
        """What a function, or the constructor of a class, takes; a dataclass takes its fields."""
        node = definition.node
        if isinstance(node, ast.ClassDef):
            members = self.members(definition)
            if "__init__" in members:
                return self.parameters(members["__init__"])[1:]  # without self
            return tuple(
                name for name, found in members.items() if isinstance(found.node, ast.AnnAssign)
            )
        if not isinstance(node, _Function):
            return ()
        args = node.args
        return tuple(arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs))

    def _path(self, module: str) -> Path:
        parts = module.split(".")
        return self.elsewhere.get(parts[0], self.root).joinpath(*parts)

    def _names(self, module: str) -> dict[str, Definition]:
        """The names that a module defines or imports at its top level."""
        if module not in self._modules:
            text = self.text(module)
            body = [] if text is None else ast.parse(text).body
            self._modules[module] = _first_of_each(body, module)
        return self._modules[module]

    def _members_of_base(self, base: ast.expr, module: str) -> dict[str, Definition]:
        """Those of a base that ``module`` names, with or without parameters in brackets."""
        named = base.value if isinstance(base, ast.Subscript) else base
        found = self.find(module, named.id) if isinstance(named, ast.Name) else None
        return {} if found is None else self.members(found)

    def _followed(self, definition: Definition | None) -> Definition | None:
        """Through imports, to what was imported; None if that is not there."""
        for _ in range(10):  # re-exports of re-exports; a circle of them is no definition
            if definition is None:
                return None
            module, node = definition
            if not isinstance(node, ast.ImportFrom):
                return definition
            definition = self._names(self._imported_from(node, module)).get(node.names[0].name)
        return None

    def _imported_from(self, node: ast.ImportFrom, module: str) -> str:
        if not node.level:
            return node.module or ""
        is_package = (self._path(module) / "__init__.py").is_file()
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _folder_of(package: str) -> Path | None:
    """The folder that a package lies in, which is not imported for that."""
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def _first_of_each(body: list[ast.stmt], module: str) -> dict[str, Definition]:
    """What each name of a body means where it is first given a meaning."""
    names: dict[str, Definition] = {}
    for statement in _statements(body):
        for name, node in _named(statement):
            names.setdefault(name, Definition(module, node))
    return names


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, those below ``if`` and ``try`` too."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements(statement.body)
            yield from _statements(statement.orelse)
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from _statements(handler.body)


def _named(statement: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    """The names to which a statement gives a meaning; imports one by one."""
    if isinstance(statement, _Function | ast.ClassDef):
        yield statement.name, statement
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            one = ast.ImportFrom(statement.module, [alias], statement.level)
            yield alias.asname or alias.name, one
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, statement


def _set_on_self(node: ast.ClassDef) -> Iterator[ast.Attribute]:
    """Every ``self.name = ...`` and ``self.name: type`` in the methods of a class."""
    for method in node.body:
        if not isinstance(method, _Function):
            continue
        for inner in ast.walk(method):
            if (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == "self"
            ):
                yield inner
