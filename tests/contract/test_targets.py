"""The Makefile's targets share the tests out: each test is in one of them, and in one only."""

from __future__ import annotations

import re
from itertools import compress, product
from pathlib import Path

import pytest

from tests.conftest import COLLECTED

ROOT = Path(__file__).parents[2]
MAKEFILE, PYPROJECT = ((ROOT / name).read_text() for name in ("Makefile", "pyproject.toml"))


class _Marked(dict[str, bool]):
    """The names of an expression of pytest's -m, for a test that has these markers."""

    def __missing__(self, name: str) -> bool:
        return False


def expressions() -> dict[str, str]:
    """What each target that runs pytest with -m selects, variables of the Makefile replaced."""
    variables = dict(re.findall(r"^(\w+) := (.+)$", MAKEFILE, re.M))
    found = {}
    for target, recipe in re.findall(r"^([a-z0-9-]+):[^\n]*\n((?:\t.*\n)+)", MAKEFILE, re.M):
        for expression in re.findall(r'pytest -m (?:"([^"]+)"|(\w+))', recipe):
            text = "".join(expression)
            while "$(" in text:
                text = re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], text)
            found[target] = text
    return found


def selects(expression: str, markers: frozenset[str]) -> bool:
    return bool(eval(expression, {}, _Marked(dict.fromkeys(markers, True))))


def test_every_test_is_in_exactly_one_target(request: pytest.FixtureRequest) -> None:
    """Of all that this run collected, before it deselected any: `make test` collects all."""
    targets = expressions()
    assert targets.keys() == {"test", "test-full", "faults", "test-vllm023"}
    collected = request.config.stash[COLLECTED]
    assert collected
    for name, markers in collected.items():
        chosen = [target for target, text in targets.items() if selects(text, markers)]
        assert len(chosen) == 1, (name, chosen)


def test_a_full_run_begins_with_the_fast_tests() -> None:
    assert re.search(r"^test-full: test ", MAKEFILE, re.M)


def test_plain_pytest_runs_the_fast_tests_and_the_rest() -> None:
    """And a test that is both in a target of its own and fast would be seen above."""
    targets, plain = expressions(), "not faults and not vllm023"
    assert f"-m '{plain}'" in PYPROJECT
    kinds = ("smoke", "engine", "process", "network", "grid", "faults", "vllm023")
    for present in product((False, True), repeat=len(kinds)):
        markers = frozenset(compress(kinds, present))
        if markers >= {"smoke", "faults"} or markers >= {"smoke", "vllm023"}:
            continue
        both = [selects(targets[target], markers) for target in ("test", "test-full")]
        assert sum(both) == selects(plain, markers), markers
