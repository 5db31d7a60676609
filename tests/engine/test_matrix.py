"""Some cells of the matrix, chosen so that every row, mode and kind of ranks occurs.

`make test-matrix` runs all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix.cells import Cell, all_cells
from tests.matrix.run import run_cell

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CELLS = (
    Cell("MLA", "compiled", "TP2", "MTP 1"),
    Cell("MLA", "eager", "DP2 x TP2", "no speculation"),
    Cell("SFA", "eager", "TP2 + EP", "MTP 1"),
    Cell("SFA, shared indexers", "compiled", "TP2", "MTP 2"),
    Cell("MLA", "eager", "PP2", "no speculation"),
)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_kvpp_on_equals_off(tmp_path: Path, cell: Cell) -> None:
    """Schedules, tokens and logprobs, to the last bit; one rank alone is refused."""
    outcome = run_cell(cell, tmp_path)
    assert outcome.right, outcome.words


def test_names_are_unique() -> None:
    """Every cell can be asked for by its name."""
    names = [cell.name for cell in all_cells()]
    assert len(names) == len(set(names)) == 90
