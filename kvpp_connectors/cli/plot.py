"""The picture of a plan: bytes per block of every rank, a panel per PP stage, as a PNG file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpp_connectors.cli.capacity_plan import Plan, StagePlan, span
from kvpp_connectors.cli.drawing import blank_figure, save_png
from kvpp_core.errors import PlanError

__all__ = ["save_plot"]

_PANELS_PER_ROW = 2
_PANEL_WIDTH = 7.2  # inches
_MOST_INCHES = 240  # of height: matplotlib draws at most 2**16 pixels
_LETTER = 0.0125  # width of a letter at a bar, as a part of the axis
# Distinct in print and for colour-blind readers.
_COLOURS = {
    "all layers (KVPP off)": "#b8c0cc",
    "owned layers": "#2f6db5",
    "scratch slots": "#f0a030",
    "draft layers": "#7d4fa3",
}
_OFF, _OWNED, _SCRATCH, _DRAFTS = _COLOURS
_INK, _FAINT, _ALARM = "#222b38", "#e3e7ed", "#b3261e"


def save_plot(plan: Plan, path: Path) -> None:
    """Draw the plan into ``path``, a PNG file; an existing file is replaced.

    Raises:
        PlanError: the name does not end in .png, or there are too many ranks to draw.
        CannotDraw: matplotlib is not installed, or the file cannot be written.
    """
    if path.suffix.lower() != ".png":
        raise PlanError(f"--plot {str(path)!r}: expected a file name that ends in .png")
    if not path.parent.is_dir():
        raise PlanError(
            f"--plot {str(path)!r}: expected a folder that exists, {path.parent} does not"
        )
    columns = min(len(plan.stages), _PANELS_PER_ROW)
    rows = -(-len(plan.stages) // columns)
    height = rows * (1.1 + _bar_inches(plan) * (_ranks(plan) + 1)) + 1.6
    if height > _MOST_INCHES:
        raise PlanError(
            f"--plot {str(path)!r}: {len(plan.stages)} stages of {_ranks(plan)} ranks are too many "
            "bars for one picture; expected at most about 1,000 ranks in all; leave --plot out"
        )
    figure = blank_figure(f"--plot {str(path)!r}", columns * _PANEL_WIDTH + 1, height)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
    panels = list(figure.subplots(rows, columns, sharex=True, squeeze=False).flat)
    unit, scale = _unit(max(max(s.capacity.bytes_per_block_on) for s in plan.stages))
    used = zip(panels, plan.stages, strict=False)  # the last row of panels may not be full
    panels[0].set_xlim(0, max(_draw_stage(panel, stage, unit, scale) for panel, stage in used))
    for panel in panels[len(plan.stages) :]:
        panel.set_visible(False)
    _draw_heading(figure, plan)
    save_png(f"--plot {str(path)!r}", figure, path)


def _draw_stage(panel: Any, stage: StagePlan, unit: str, scale: int) -> float:
    """Horizontal bars: KVPP off on top, then every rank of the stage's group.

    Returns the end of the x axis that leaves room for the labels behind the bars.
    """
    figures = stage.capacity
    off = figures.bytes_per_block_off
    labels = ["KVPP off, any rank"]
    _draw_bar(panel, 0, {_OFF: off - stage.draft_bytes, _DRAFTS: stage.draft_bytes}, scale)
    room = _label_bar(panel, 0, off / scale, f"{off / scale:,.2f} {unit}")
    for rank, owned in enumerate(stage.owned_bytes):
        scratch = figures.scratch_bytes[rank]
        parts = {_OWNED: owned, _SCRATCH: scratch, _DRAFTS: stage.draft_bytes}
        _draw_bar(panel, rank + 1, parts, scale)
        total = sum(parts.values())
        label = f"{total / scale:,.2f} {unit}, {total / off:.1%} of off"
        binds = rank == figures.binding_rank
        room = max(room, _label_bar(panel, rank + 1, total / scale, label, binds=binds))
        labels.append(f"rank {rank}, {span(figures.owned_layers[rank])}")
    panel.set_yticks(range(len(labels)), labels, fontsize=9)
    panel.set_ylim(len(labels) - 0.5, -0.5)  # KVPP off on top
    panel.set_xlabel(f"{unit} per block", fontsize=9)
    panel.tick_params(axis="x", labelbottom=True, labelsize=9)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color=_FAINT)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.set_title(
        f"Stage {figures.stage}: {span(figures.layers)}, ratio {figures.ratio:.3f}",
        loc="left",
        fontsize=11,
        color=_INK,
    )
    return room


def _draw_bar(panel: Any, row: int, parts: dict[str, int], scale: int) -> None:
    left = 0.0
    for part, size in parts.items():
        if size:
            panel.barh(
                row, size / scale, left=left, height=0.72, color=_COLOURS[part], edgecolor="white"
            )
            left += size / scale


def _label_bar(panel: Any, row: int, end: float, label: str, *, binds: bool = False) -> float:
    """Label a bar at its end. Returns the end of the x axis that the label needs."""
    label += "  (binds)" if binds else ""
    panel.annotate(
        label,
        (end, row),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        fontweight="bold" if binds else "normal",
        color=_INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    return end / (1 - _LETTER * (len(label) + 2))


def _draw_heading(figure: Any, plan: Plan) -> None:
    from matplotlib.patches import Patch

    request, capacity = plan.request, plan.capacity
    figure.suptitle(
        f"KVPP holds {capacity.ratio:.3f} times the tokens: {capacity.tokens_off:,} off, "
        f"{capacity.tokens_on:,} on\n"
        f"{request.shape.name}, TP {request.tp} x PCP {request.pcp}, PP {request.pp}, blocks of "
        f"{request.block_size} tokens",
        fontsize=13,
        color=_INK if capacity.ratio > 1 else _ALARM,
    )
    drafts = any(stage.draft_bytes for stage in plan.stages)
    shown = [part for part in _COLOURS if part != _DRAFTS or drafts]
    figure.legend(
        handles=[Patch(color=_COLOURS[part], label=part) for part in shown],
        loc="outside lower center",
        ncols=len(shown),
        frameon=False,
        fontsize=10,
    )


def _ranks(plan: Plan) -> int:
    return plan.request.tp * plan.request.pcp


def _bar_inches(plan: Plan) -> float:
    return 0.36 if _ranks(plan) <= 16 else 0.22


def _unit(largest: int) -> tuple[str, int]:
    """The decimal unit in which the largest size reads well, and its bytes."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if largest >= scale:
            return unit, scale
    return "B", 1
