"""docs/ and the code agree: every key with its default, and every file that one names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from kvpp_connectors.launch.options import KvppOptions
from kvpp_connectors.p2p.options import P2pOptions
from kvpp_connectors.pool.options import IDLE_KEYS, PoolOptions
from kvpp_connectors.pool.store.mooncake_settings import MooncakeSettings
from tests.contract.documents import DOCS, ROOT, table

TABLES: list[tuple[str, type[BaseModel]]] = [
    ("## KVPP", KvppOptions),
    ("### MooncakeConnectorV2", P2pOptions),
    ("### AscendStoreConnector", PoolOptions),
    ("### Mooncake", MooncakeSettings),
]
PAGE = "configuration.md"
UNITS = {"MiB": 20, "GiB": 30}


def says(cell: str, default: Any) -> bool:
    """Whether a cell gives a default. One that is found out at run time is told in words."""
    text = cell.strip("` ")
    if default is None or default == "":
        return not re.match(r"[\d\"]|true|false", text) and text != ""
    if default is PydanticUndefined:
        return text == "required"
    if isinstance(default, bool | Enum | str):
        return text == str(getattr(default, "value", default)).replace("True", "true").replace(
            "False", "false"
        )
    if isinstance(default, tuple):
        return text == ", ".join(map(str, default))
    number, _, unit = text.partition(" ")
    return bool(float(number) * (1 << UNITS.get(unit, 0)) == default)


def differences(heading: str, model: type[BaseModel]) -> Iterator[str]:
    """What a table and the code say of each key, where they differ."""
    rows = {row[0].strip("`"): row[1] for row in table(PAGE, heading)}
    for key in rows.keys() ^ model.model_fields.keys():
        yield f"{heading}: {key} is {'documented' if key in rows else 'in the code'} only"
    for key in rows.keys() & model.model_fields.keys():
        if not says(rows[key], default := model.model_fields[key].default):
            yield f"{heading}: {key} is {rows[key]} in the table and {default!r} in the code"


def test_the_tables_have_every_key_with_its_default() -> None:
    assert not [found for heading, model in TABLES for found in differences(heading, model)]


def test_ignored_keys_are_listed() -> None:
    text = (DOCS / PAGE).read_text()
    paragraph = text.split("other launch lines and ignored, with one log line:")[1].split("###")[0]
    assert set(re.findall(r"`(\w+)`", paragraph)) == IDLE_KEYS.keys()


PATHS = re.compile(r"`((?:docs|examples|tests|kvpp_core|kvpp_connectors|\.ci)/[\w./-]+)(?:::\S+)?`")
LINKS = re.compile(r"\]\((?!https?:|#)([^)#]+)")
NAMED = re.compile(r"\b(docs/\w+\.md)")
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]
SOURCES = ("kvpp_connectors", "kvpp_core", "benchmarks", "tests", "examples")


def test_every_file_that_a_page_names_is_there() -> None:
    """In code, from the repository's root; and as a link, where mkdocs does not look: README."""
    missing = []
    for page in PAGES:
        text = page.read_text()
        named = [ROOT / path for path in PATHS.findall(text)]
        named += [page.parent / path for path in LINKS.findall(text)]
        missing += [f"{page.name}: {path}" for path in named if not path.exists()]
    assert not missing


def test_every_page_that_the_code_names_is_there() -> None:
    """Docstrings, error messages and comments; and every page has its place in the site."""
    tracked = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.*"))]
    sources = [path for path in tracked if path.suffix in (".py", ".sh", ".md", ".json")]
    named = {(page, path) for path in sources for page in NAMED.findall(path.read_text())}
    missing = {f"{path}: {page}" for page, path in named if not (ROOT / page).is_file()}
    assert not missing
    site = set(re.findall(r"- (\w+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert site == {page.name for page in DOCS.glob("*.md")}
