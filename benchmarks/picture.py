"""The picture of a benchmark: curves of ratios with their quartiles, as a PNG file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.base import Picture
from kvpp_connectors.cli.drawing import blank_figure, save_png

__all__ = ["draw"]

_COMMAND = "python -m benchmarks report"
_INCHES = (8.0, 4.5)
_COLOURS = ("#2f6db5", "#f0a030", "#7d4fa3", "#3f8f5f")  # distinct in print, too
_MARKS = ("o", "s", "^", "D")
_FAINT = "#e3e7ed"


def draw(picture: Picture, path: Path) -> None:
    """Draw into ``path``, a PNG file; an existing file is replaced.

    Raises:
        CannotDraw: matplotlib is not installed, or the file cannot be written.
    """
    figure = blank_figure(_COMMAND, *_INCHES)
    axes = figure.subplots()
    for number, curve in enumerate(picture.curves):
        xs = [x for x, _ in curve.points]
        medians = [ratio.median for _, ratio in curve.points]
        below = [ratio.median - ratio.low for _, ratio in curve.points]
        above = [ratio.high - ratio.median for _, ratio in curve.points]
        axes.errorbar(
            xs,
            medians,
            yerr=(below, above),
            label=curve.label,
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKS[number % len(_MARKS)],
            linestyle="-" if number < len(_COLOURS) else "--",
            capsize=3,
        )
    _scale(axes, picture)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(title=picture.title, xlabel=picture.x_label, ylabel=picture.y_label)
    axes.grid(color=_FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save_png(f"{_COMMAND}: {path}", figure, path)


def _scale(axes: Any, picture: Picture) -> None:
    """Put the x axis' ticks at the measured points; logarithmic if the picture says so."""
    places = sorted({x for curve in picture.curves for x, _ in curve.points})
    if picture.log_x:
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
