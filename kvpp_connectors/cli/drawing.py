"""Figures of matplotlib (an extra) without a display, and their PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpp_core.errors import KvppError

__all__ = ["CannotDraw", "blank_figure", "save_png"]

_DPI = 150


class CannotDraw(KvppError):
    """matplotlib is not installed, or the file cannot be written."""


def blank_figure(option: str, width: float, height: float) -> Any:
    """An empty figure, ``width`` x ``height`` inches; errors name ``option``, which asked for it.

    Raises:
        CannotDraw: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CannotDraw(
            f"{option} needs matplotlib, which cannot be imported ({error}); run "
            "pip install 'kvpp-connectors[plot]'"
        ) from None
    figure: Any = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    return figure


def save_png(option: str, figure: Any, path: Path) -> None:
    """Write the figure, replacing an existing file; errors name ``option``.

    Raises:
        CannotDraw: the file cannot be written.
    """
    try:
        figure.savefig(path, format="png", dpi=_DPI)
    except OSError as error:
        raise CannotDraw(
            f"{option} cannot be written ({error.strerror}); expected a file that may be created"
        ) from None
