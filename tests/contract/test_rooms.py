"""Which room may import which: arrows go down only, and never in a circle.

Imports inside functions count, and so do modules that are named in text to be imported later (a
worker class, a connector's module).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "kvpp_connectors"
CORE = "kvpp_core"
BENCHMARKS = "benchmarks"

# From the top down: a room may import those that stand in its row, and none besides. `log` and the
# core are open to every room but the proxy, which imports nothing of ours but `log`.
ALLOWED: dict[str, tuple[str, ...]] = {
    BENCHMARKS: (
        *("cli", "demo", "mooncake_admin", "engine", "launch", "p2p", "pool", "connector"),
        "vllm_api",
    ),
    "cli": (
        *("demo", "mooncake_admin", "proxy", "plugin", "engine", "launch", "p2p", "pool"),
        *("connector", "vllm_api"),
    ),
    "demo": ("mooncake_admin", "connector"),
    "mooncake_admin": ("pool", "connector"),
    "plugin": ("engine", "launch", "connector"),
    "engine": ("launch", "connector", "vllm_api"),
    "launch": ("p2p", "pool", "multi", "connector", "vllm_api"),
    "multi": ("p2p", "pool", "connector"),
    "p2p": ("connector", "vllm_api"),
    "pool": ("connector", "vllm_api"),
    "connector": ("vllm_api",),
    "vllm_api": (),
    "proxy": (),
    "log": (),
    CORE: (),
}

# Text that names a module of a room above: the command line of another process.
NAMED = {("demo", "cli"): "the proxy runs as `python -m kvpp_connectors.cli proxy`"}

# What the launch gate imports of the connectors: how they read their options, nothing that runs.
READ_BY_THE_GATE = ("options", "mooncake_settings", "memcache_settings")


def rooms_of(root: Path) -> dict[str, list[Path]]:
    """The files of each room, by its name."""
    found: dict[str, list[Path]] = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        inside = path.relative_to(root / PACKAGE)
        if inside.parts != ("__init__.py",):
            found.setdefault(inside.parts[0].removesuffix(".py"), []).append(path)
    for other in (CORE, BENCHMARKS):
        if files := sorted((root / other).rglob("*.py")):
            found[other] = files
    return found


def room(module: str) -> str | None:
    """The room of a dotted module, or of a class in it; None for other packages."""
    parts = module.split(".")
    if parts[0] in (CORE, BENCHMARKS):
        return parts[0]
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, module, whether it is imported or only named) of all that a file takes from rooms."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == PACKAGE:
                yield from ((node.lineno, f"{PACKAGE}.{alias.name}", True) for alias in node.names)
            else:
                yield node.lineno, node.module, True
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            dotted = node.value.partition(":")[0]
            if dotted.startswith(f"{PACKAGE}.") and all(map(str.isidentifier, dotted.split("."))):
                yield node.lineno, dotted, False


def arrows(root: Path) -> dict[tuple[str, str], list[str]]:
    """Every arrow from a room to another one, and where it stands."""
    found: dict[tuple[str, str], list[str]] = {}
    for start, files in rooms_of(root).items():
        for path in files:
            for line, module, imported in imports(path):
                end = room(module)
                if end is None or end == start or (not imported and (start, end) in NAMED):
                    continue
                where = f"{path.relative_to(root)}:{line} {module}"
                found.setdefault((start, end), []).append(where)
    return found


def turned(found: Mapping[tuple[str, str], list[str]]) -> list[str]:
    """What stands in the way of the table, one line each."""
    everywhere = {"log", CORE}
    return [
        f"{start} -> {end}: {where}"
        for (start, end), places in found.items()
        for where in places
        if end not in ALLOWED.get(start, ())
        and not (end in everywhere and start not in {"proxy", "log", CORE})
        and (start, end) != ("proxy", "log")
    ]


def circle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """Rooms that import one another in a circle; none if the list is empty."""
    left = set(edges)
    while True:
        starts, ends = ({edge[i] for edge in left} for i in (0, 1))
        kept = {(start, end) for start, end in left if start in ends and end in starts}
        if kept == left:
            return sorted(starts)
        left = kept


def test_every_room_stands_in_the_table() -> None:
    assert set(rooms_of(ROOT)) == set(ALLOWED)


def test_the_table_has_no_circle() -> None:
    assert circle((start, end) for start, ends in ALLOWED.items() for end in ends) == []


def test_rooms_import_only_what_stands_below_them() -> None:
    assert turned(arrows(ROOT)) == []


def test_the_launch_gate_imports_the_connectors_options_alone() -> None:
    """It runs where no model is: engines, threads and sockets have no place there."""
    found = {
        module
        for path in rooms_of(ROOT)["launch"]
        for _, module, imported in imports(path)
        if imported and room(module) in ("p2p", "pool", "multi")
    }
    assert found
    assert {module for module in found if not module.endswith(READ_BY_THE_GATE)} == set()


def test_no_rooms_import_one_another_in_a_circle() -> None:
    assert circle(arrows(ROOT)) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("kvpp_connectors/pool/worker.py", "from kvpp_connectors.engine.worker import W"),
        ("kvpp_connectors/pool/worker.py", "from kvpp_connectors import launch"),
        ("kvpp_connectors/p2p/rpc.py", "def f():\n    import kvpp_connectors.pool.keys"),
        ("kvpp_connectors/connector/base.py", 'CLASS = "kvpp_connectors.engine.worker.Worker"'),
        ("kvpp_connectors/proxy/app.py", "from kvpp_core.errors import KvppError"),
        ("kvpp_connectors/cli/main.py", "from benchmarks.step import bench_step"),
        ("kvpp_core/pipeline.py", "from kvpp_connectors.log import get_logger"),
    ],
)
def test_an_arrow_that_is_turned_is_seen(tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (complaint,) = turned(arrows(tmp_path))
    assert file in complaint


def test_a_circle_is_seen() -> None:
    assert circle([("x", "a"), ("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]) == ["a", "b", "c"]
    assert circle([("a", "b"), ("b", "c"), ("a", "c")]) == []
