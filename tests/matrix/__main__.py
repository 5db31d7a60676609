"""Prints the matrix: python -m tests.matrix [--only WORDS ...] [--list].

Every cell starts two engines, one with KVPP and one without, and compares schedules, tokens and
logprobs to the last bit. The whole table takes more than an hour on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.matrix.cells import MODELS, MODES, SPECULATION, TOPOLOGIES, Cell, all_cells
from tests.matrix.run import Outcome, run_cell

__all__ = ["main"]


def main() -> int:
    """Run the chosen cells; 1 when one of them is wrong."""
    parser = argparse.ArgumentParser(prog="make test-matrix", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="words that a cell's name must have")
    parser.add_argument("--list", action="store_true", help="print the cells' names and end")
    options = parser.parse_args()
    cells = [cell for cell in all_cells() if all(word in cell.name for word in options.only)]
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    outcomes: dict[Cell, Outcome] = {}
    for cell in cells:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kvpp-matrix-") as folder:
            outcomes[cell] = run_cell(cell, Path(folder))
        seconds = time.monotonic() - started
        print(f"{cell.name} ({seconds:.0f} s): {outcomes[cell].words}", file=sys.stderr, flush=True)
    print(_table(outcomes))
    return int(any(outcome.right is False for outcome in outcomes.values()))


def _table(outcomes: dict[Cell, Outcome]) -> str:
    """A Markdown table; long words go below it, once each."""
    notes: list[str] = []
    lines = [
        "| KVPP on = off | " + " | ".join(SPECULATION) + " |",
        "|---" * (len(SPECULATION) + 1) + "|",
    ]
    for model in MODELS:
        for mode in MODES:
            for topology in TOPOLOGIES:
                cells = [Cell(model, mode, topology, spec) for spec in SPECULATION]
                if not any(cell in outcomes for cell in cells):
                    continue
                words = " | ".join(_word(outcomes.get(cell), notes) for cell in cells)
                lines.append(f"| {model}, {mode}, {topology} | {words} |")
    return "\n".join([*lines, "", *(f"[{n}] {note}" for n, note in enumerate(notes, 1))])


def _word(outcome: Outcome | None, notes: list[str]) -> str:
    if outcome is None:
        return ""
    if outcome.words == "yes":
        return "yes"
    if outcome.words not in notes:
        notes.append(outcome.words)
    verdict = {True: "yes", False: "NO", None: "cannot run"}[outcome.right]
    if outcome.words.startswith("refused"):
        verdict = "refused"
    return f"{verdict} [{notes.index(outcome.words) + 1}]"


if __name__ == "__main__":
    sys.exit(main())
