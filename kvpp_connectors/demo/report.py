"""The demo's tables: a row per figure, checked where it can be wrong."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

__all__ = ["Row", "table"]


@dataclass(frozen=True, slots=True)
class Row:
    """A name and its figures; ``ok`` is None for a figure that cannot be wrong."""

    name: str
    figures: tuple[str, ...]
    ok: bool | None = None


def table(columns: tuple[str, ...], rows: list[Row]) -> Table:
    """A rich table of the rows, with a mark at each checked one."""
    result = Table("", *columns, "check")
    for row in rows:
        mark = {None: "", True: "[green]ok[/green]", False: "[red]WRONG[/red]"}[row.ok]
        result.add_row(row.name, *row.figures, mark)
    return result
