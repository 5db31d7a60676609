"""docs/safety.md and docs/field_reports.md say what is there: files, tests, places to break."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.safety.mutations import MUTATIONS, PROPERTIES, Mutation

ROOT = Path(__file__).parent.parent.parent
ENTRIES = [
    line.split("|")[1:-1]
    for line in (ROOT / "docs" / "field_reports.md").read_text().splitlines()
    if re.match(r"\| \d\.\d \|", line)
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_mutation_can_be_made_and_its_test_exists(mutation: Mutation) -> None:
    """`python -m tests.safety` makes it."""
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    file, _, name = mutation.test.partition("::")
    assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text()


def test_every_property_has_a_mutation_and_a_row() -> None:
    """docs/safety.md is the tables, row by row; each property has a module of its own."""
    text = (ROOT / "docs" / "safety.md").read_text()
    for name, meaning in PROPERTIES.items():
        [module] = (ROOT / "tests" / "safety").glob(f"test_s{int(name[1:]):02}_*.py")
        assert module.read_text().startswith(f'"""{name}: ')
        file = str(module.relative_to(ROOT))
        assert f"| {name} | {meaning} | `{file}` |" in text
        own = [mutation for mutation in MUTATIONS if mutation.breaks == name]
        assert any(mutation.test.startswith(file) for mutation in own), name
    rows = [
        f"| {mutation.breaks} | {mutation.what} | `{mutation.file}` | `{mutation.test}` |"
        for mutation in MUTATIONS
    ]
    assert [line for line in text.splitlines() if line in rows] == rows


def test_every_field_report_has_a_row() -> None:
    """In order, each once."""
    numbers = [entry[0].strip() for entry in ENTRIES]
    assert numbers == sorted(set(numbers)) and len(numbers) == 38


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry[0].strip()))
def test_the_tests_of_a_field_report_name_it(entry: list[str]) -> None:
    """Each file exists and says which entry it is for; one without a test says what is open."""
    number, files = entry[0].strip(), re.findall(r"`(\S+\.py)`", entry[3])
    assert files or entry[4].strip()
    for file in files:
        assert re.search(
            rf"(?<![\d.]){re.escape(number)}(?!\d)", (ROOT / "tests" / file).read_text()
        )
