"""docs/testing.md says what is there: properties, tests, and places to break."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.contract.documents import ROOT, table
from tests.safety.mutations import MUTATIONS, PROPERTIES

PAGE = "testing.md"
FIELD_REPORTS = 38  # entries of the collection that the page answers


def test_every_mutation_can_be_made_and_its_test_exists() -> None:
    """`python -m tests.safety` makes them; each needs its source text once."""
    wrong = []
    for mutation in MUTATIONS:
        if (count := (ROOT / mutation.file).read_text().count(mutation.old)) != 1:
            wrong.append(f"{mutation.what}: {mutation.file} has the old text {count} times")
        file, _, name = mutation.test.partition("::")
        if f"def {name.partition('[')[0]}" not in (ROOT / file).read_text():
            wrong.append(f"{mutation.what}: {file} has no {name}")
    assert not wrong


def test_every_property_has_a_row_a_module_and_a_mutation() -> None:
    """A module's first line names its property, and a mutation is found by a test of it."""
    modules = {}
    for name in PROPERTIES:
        [module] = (ROOT / "tests" / "safety").glob(f"test_s{int(name[1:]):02}_*.py")
        assert module.read_text().startswith(f'"""{name}: ')
        modules[name] = str(module.relative_to(ROOT))
    rows = [[name, meaning, f"`{modules[name]}`"] for name, meaning in PROPERTIES.items()]
    assert table(PAGE, "## What must always hold") == rows
    found = {m.breaks for m in MUTATIONS if m.test.startswith(modules[m.breaks])}
    assert found == PROPERTIES.keys()


def test_every_field_report_is_answered_by_tests_that_name_it() -> None:
    """In order, each once; one without a test says what is open."""
    entries = table(PAGE, "## Field reports")
    numbers = [entry[0] for entry in entries]
    assert numbers == sorted(set(numbers)) and len(numbers) == FIELD_REPORTS
    assert not [wrong for entry in entries for wrong in _wrong(entry)]


def _wrong(entry: list[str]) -> Iterator[str]:
    number, files = entry[0], re.findall(r"`(\S+\.py)`", entry[2])
    if not files and not entry[3]:
        yield f"{number} has neither a test nor says what is open"
    for file in files:
        path = ROOT / "tests" / file
        if not path.is_file():
            yield f"{number}: tests/{file} does not exist"
        elif not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", path.read_text()):
            yield f"{number}: tests/{file} does not name it"
