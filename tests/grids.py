"""Grids: every combination belongs to the full tests, one of each kind to the fast ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

__all__ = ["grid"]


def grid(values: Iterable[Any], fast: Callable[[Any], bool]) -> list[Any]:
    """Parameters of a test: those that are not ``fast`` are marked as the rest of a grid."""
    return [
        value if fast(value) else pytest.param(value, marks=pytest.mark.grid) for value in values
    ]
