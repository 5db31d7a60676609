"""`python -m benchmarks report`: put records into docs/benchmarks.md, and draw their pictures.

The page is written by hand; what lies between a benchmark's markers is replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.base import Record
from benchmarks.picture import draw
from benchmarks.records import BENCHES, BadRecord, read_record, record_file
from kvpp_connectors.cli.drawing import CannotDraw

__all__ = ["BadPage", "bench_report", "markers", "replace", "section"]

_BAD_INPUT = 2  # exit code
_IMAGES = "images"  # beside the page


class BadPage(Exception):
    """The page has no place for a benchmark. The message names the marker."""


def bench_report(
    folder: Annotated[
        Path, typer.Argument(help="What `python -m benchmarks all --into` has filled.")
    ],
    docs: Annotated[
        Path, typer.Option(help="The page; pictures go into images/ beside it.")
    ] = Path("docs/benchmarks.md"),
) -> None:
    """Replace the figures in docs/benchmarks.md by those of FOLDER, and draw their pictures.

    Benchmarks without a record in FOLDER keep the figures that they have. Exit code 2 if a record
    or the page cannot be read, or the pictures not drawn; then the page is as it was.
    """
    try:
        records = _read_all(folder)
        page = _read_page(docs)
        for record in records:
            page = replace(page, record.run.name, section(record))
        _draw_all(records, docs.parent / _IMAGES)
    except (BadRecord, BadPage, CannotDraw) as error:
        typer.echo(f"python -m benchmarks report: {error}", err=True)
        raise typer.Exit(_BAD_INPUT) from None
    docs.write_text(page)
    typer.echo(f"{docs}: {', '.join(record.run.name for record in records)}")


def section(record: Record) -> str:
    """What stands between the markers: how it was taken, tables, and the picture."""
    parts = [record.run.header(), *(table.markdown() for table in record.figures.tables())]
    picture = record.figures.picture()
    if picture is not None:
        parts.append(f"![{picture.title}]({_IMAGES}/{_image(record)})")
    return "\n\n".join(parts)


def markers(name: str) -> tuple[str, str]:
    """The lines before and after a benchmark's figures."""
    return f"<!-- bench: {name} -->", f"<!-- /bench: {name} -->"


def replace(page: str, name: str, text: str) -> str:
    """The page with ``text`` between the markers of a benchmark.

    Raises:
        BadPage: a marker is missing, stands there twice, or the two are in the wrong order.
    """
    for marker in markers(name):
        if (count := page.count(marker)) != 1:
            raise BadPage(
                f"the page has {marker} {count} times; expected it once, on a line of its own "
                f"{'after' if '/' in marker else 'before'} the figures of "
                f"`python -m benchmarks {name}`"
            )
    first, last = markers(name)
    before, _, rest = page.partition(first)
    _, found, after = rest.partition(last)
    if not found:
        raise BadPage(f"the page has {last} before {first}; expected it behind the figures")
    return f"{before}{first}\n\n{text}\n\n{last}{after}"


def _read_all(folder: Path) -> list[Record]:
    files = [record_file(folder, name) for name in BENCHES]
    records = [read_record(file) for file in files if file.is_file()]
    if not records:
        names = ", ".join(file.name for file in files)
        raise BadRecord(f"{folder} has no record; expected at least one of {names}")
    return records


def _read_page(docs: Path) -> str:
    try:
        return docs.read_text()
    except OSError as error:
        raise BadPage(f"{docs} cannot be read ({error.strerror}); expected the page") from None


def _draw_all(records: list[Record], images: Path) -> None:
    for record in records:
        picture = record.figures.picture()
        if picture is not None:
            images.mkdir(exist_ok=True)
            draw(picture, images / _image(record))


def _image(record: Record) -> str:
    return f"bench_{record.run.name}.png"
