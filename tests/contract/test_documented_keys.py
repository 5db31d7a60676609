"""The key tables in docs/ are the code's: every key, its default, and no other."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from kvpp_connectors.launch.options import KvppOptions
from kvpp_connectors.p2p.options import P2pOptions
from kvpp_connectors.pool.options import IDLE_KEYS, PoolOptions
from kvpp_connectors.pool.store.mooncake_settings import MooncakeSettings
from tests.contract.documents import DOCS, table

TABLES: list[tuple[str, str, type[BaseModel]]] = [
    ("configuration.md", "# Configuration", KvppOptions),
    ("p2p.md", "## Options (`kv_connector_extra_config`)", P2pOptions),
    ("pool.md", "## Options (`kv_connector_extra_config`)", PoolOptions),
    ("pool.md", "### Mooncake", MooncakeSettings),
]
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


@pytest.mark.parametrize(("page", "heading", "model"), TABLES, ids=lambda value: str(value))
def test_a_table_has_every_key_with_its_default(
    page: str, heading: str, model: type[BaseModel]
) -> None:
    rows = {row[0].strip("`"): row for row in table(page, heading)}
    assert rows.keys() == model.model_fields.keys()
    wrong = {
        key: (rows[key][1], field.default)
        for key, field in model.model_fields.items()
        if not says(rows[key][1], field.default)
    }
    assert not wrong


def test_keys_that_decide_nothing_are_listed() -> None:
    text = (DOCS / "pool.md").read_text()
    paragraph = text.split("decide nothing here:")[1].split("Anything else")[0]
    assert set(re.findall(r"`(\w+)`", paragraph)) == IDLE_KEYS.keys()


PATHS = re.compile(r"`((?:docs|examples|tests|kvpp_core|kvpp_connectors|\.ci)/[\w./-]+)(?:::\S+)?`")
LINKS = re.compile(r"\]\((?!https?:|#)([^)#]+)")
PAGES = [*sorted(DOCS.glob("*.md")), *(DOCS.parent / name for name in ("README.md",))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    """In code, from the repository's root; and as a link, where mkdocs does not look: README."""
    text = page.read_text()
    root = DOCS.parent
    named = [root / path for path in PATHS.findall(text)]
    named += [page.parent / path for path in LINKS.findall(text)]
    assert not [path for path in named if not path.exists()]
