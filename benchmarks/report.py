"""`python -m benchmarks report`: the main ratios of records into docs/performance.md, and pictures.

The page is written by hand; what lies between its two markers is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.base import Record, Table
from benchmarks.picture import draw
from benchmarks.records import RESULTS, BadRecord, read_records
from kvpp_connectors.cli.drawing import CannotDraw

__all__ = ["MARKERS", "BadPage", "bench_report", "ratios", "replace"]

MARKERS = ("<!-- results -->", "<!-- /results -->")
_BAD_INPUT = 2  # exit code
_IMAGES = "images"  # beside the page


class BadPage(Exception):
    """The page has no place for the ratios. The message names the marker."""


def bench_report(
    folder: Annotated[
        Path, typer.Argument(help="Records, as `python -m benchmarks all --into` writes them.")
    ] = RESULTS,
    page: Annotated[
        Path,
        typer.Option(help="Markdown with the two markers; pictures go into images/ beside it."),
    ] = Path("docs/performance.md"),
    tables: Annotated[
        bool, typer.Option("--tables", help="Print all tables of the records; change nothing.")
    ] = False,
) -> None:
    """Put the main ratios of FOLDER's records into docs/performance.md, and draw their pictures.

    Exit code 2 if a record or the page cannot be read, or the pictures cannot be drawn; the page
    is then unchanged.
    """
    try:
        records = read_records(folder)
        if tables:
            typer.echo("\n\n".join(map(_whole, records)))
            return
        text = replace(_read_page(page), ratios(records))
        _draw_all(records, page.parent / _IMAGES)
    except (BadRecord, BadPage, CannotDraw) as error:
        typer.echo(f"python -m benchmarks report: {error}", err=True)
        raise typer.Exit(_BAD_INPUT) from None
    page.write_text(text)
    typer.echo(f"{page}: {', '.join(record.run.name for record in records)}")


def ratios(records: Sequence[Record]) -> str:
    """What stands between the markers: a row for each record, then the pictures."""
    rows = tuple(
        (
            f"`{record.run.command}`",
            record.figures.summary(),
            f"{record.run.date}, {record.run.commit}, load {record.run.load_before:.1f}",
        )
        for record in records
    )
    table = Table("Main ratios, least to greatest median", ("command", "ratios", "taken"), rows)
    drawn = [(record, picture) for record in records if (picture := record.figures.picture())]
    images = [f"![{picture.title}]({_IMAGES}/{_image(record)})" for record, picture in drawn]
    return "\n\n".join([table.markdown(), *images])


def replace(page: str, text: str) -> str:
    """The page with ``text`` between the markers.

    Raises:
        BadPage: a marker is missing, occurs twice, or the two are in the wrong order.
    """
    first, last = MARKERS
    for marker in MARKERS:
        if (count := page.count(marker)) != 1:
            raise BadPage(f"the page has {marker} {count} times; expected it once, on its own line")
    before, _, rest = page.partition(first)
    _, found, after = rest.partition(last)
    if not found:
        raise BadPage(f"the page has {last} before {first}; expected it behind the ratios")
    return f"{before}{first}\n\n{text}\n\n{last}{after}"


def _whole(record: Record) -> str:
    tables = (table.markdown() for table in record.figures.tables())
    return "\n\n".join([f"## {record.run.name}", record.run.header(), *tables])


def _read_page(page: Path) -> str:
    try:
        return page.read_text()
    except OSError as error:
        raise BadPage(f"{page} cannot be read ({error.strerror}); expected the page") from None


def _draw_all(records: Sequence[Record], images: Path) -> None:
    for record in records:
        picture = record.figures.picture()
        if picture is not None:
            images.mkdir(exist_ok=True)
            draw(picture, images / _image(record))


def _image(record: Record) -> str:
    return f"bench_{record.run.name}.png"
