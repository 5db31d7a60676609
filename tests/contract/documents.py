"""The tables of docs/, for tests that compare them with the code."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DOCS", "ROOT", "table"]

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"


def table(page: str, heading: str, index: int = 0) -> list[list[str]]:
    """The rows, without the head, of the ``index``-th table under a heading of a page."""
    lines = (DOCS / page).read_text().splitlines()
    assert lines.count(heading) == 1, f"{page} has no single heading {heading!r}"
    tables: list[list[list[str]]] = []
    inside = False
    for line in lines[lines.index(heading) + 1 :]:
        if line.startswith("#"):
            break
        if line.startswith("|"):
            if not inside:
                tables.append([])
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        inside = line.startswith("|")
    return tables[index][2:]
