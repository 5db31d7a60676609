"""The picture of one step: an SVG with a row per rank and lane."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from benchmarks.trace.figures import TracedStep
from kvpp_core.trace import Lane, Span

__all__ = ["draw"]

_LEFT, _RIGHT, _TOP, _WIDTH = 132, 16, 64, 1200  # pixels
_ROW, _BAR, _GAP = 24, 18, 14
_LETTER = 6.2  # width of a letter in a bar
_TICKS = 12  # at most
_COLOURS = {
    "layer": "#2f6db5",
    "launch": "#8fb4dc",
    "wait": "#b3261e",
    "pack": "#c77c11",
    "send": "#f0a030",
    "unpack": "#8a5a10",
    "queued": "#e3e7ed",
    "queries": "#c77c11",
    "attention": "#2f6db5",
    "results": "#8a5a10",
    "load": "#2e8b57",
    "save": "#7d4fa3",
}
_INK, _FAINT, _PAPER = "#222b38", "#d5dae2", "#ffffff"


def draw(step: TracedStep, title: str) -> str:
    """The step as an SVG document."""
    begin, end = min(s.begin for s in step.whole), max(s.end for s in step.whole)
    rows = list(_rows(step))
    height = _TOP + len(rows) * _ROW + (len(step.ranks) - 1) * _GAP + 34
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - begin)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="{_PAPER}"/>',
        _text(16, 22, title, size=15),
        *_legend(rows),
        *_axis(begin, end, scale, height),
    ]
    for number, (rank, lane, spans) in enumerate(rows):
        y = _TOP + number * _ROW + rank * _GAP
        parts.append(_text(16, y + 13, f"rank {rank} {lane}"))
        parts += [_bar(span, y, begin, end, scale) for span in spans]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rows(step: TracedStep) -> Iterator[tuple[int, Lane, list[Span]]]:
    """Rank, lane and spans of every row; lanes without spans are left out."""
    last = max(span.end for span in step.whole)
    for rank in range(len(step.ranks)):
        for lane in Lane:
            spans = [s for s in step.find(rank, lane) if s.name in _COLOURS and s.begin < last]
            if spans:
                yield rank, lane, spans


def _bar(span: Span, y: int, begin: int, end: int, scale: float) -> str:
    x = _LEFT + (max(span.begin, begin) - begin) * scale
    width = max((min(span.end, end) - max(span.begin, begin)) * scale, 0.6)
    label = str(span.layer) if width > _LETTER * (len(str(span.layer)) + 1) else ""
    faint = span.name in ("queued", "launch", "send")
    said = f"layer {span.layer}: {span.name}, {span.seconds * 1e3:.3f} ms"
    return (
        f'<g><title>{escape(said)}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" '
        f'height="{_BAR}" fill="{_COLOURS[span.name]}" stroke="{_PAPER}" stroke-width="0.5"/>'
        + _text(x + width / 2, y + 13, label, _INK if faint else _PAPER, anchor="middle")
        + "</g>"
    )


def _legend(rows: list[tuple[int, Lane, list[Span]]]) -> Iterator[str]:
    used = {span.name for _, _, spans in rows for span in spans}
    x = 16.0
    for name, colour in _COLOURS.items():
        if name in used:
            yield f'<rect x="{x:.0f}" y="34" width="12" height="12" fill="{colour}"/>'
            yield _text(x + 17, 44, name)
            x += 34 + _LETTER * len(name)


def _axis(begin: int, end: int, scale: float, height: int) -> Iterator[str]:
    unit = 1e6  # ns in the millisecond that the axis counts in
    span = (end - begin) / unit
    tick = next(t * 10**e for e in range(-3, 6) for t in (1, 2, 5) if span / (t * 10**e) <= _TICKS)
    for number in range(int(span / tick) + 1):
        x = _LEFT + number * tick * unit * scale
        yield f'<path d="M{x:.1f} {_TOP - 6}V{height - 28}" stroke="{_FAINT}"/>'
        yield _text(x, height - 12, f"{number * tick:g} ms", anchor="middle")


def _text(
    x: float, y: float, text: str, colour: str = _INK, *, size: int = 12, anchor: str = "start"
) -> str:
    if not text:
        return ""
    return (
        f'<text x="{x:.1f}" y="{y:.0f}" fill="{colour}" font-size="{size}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
