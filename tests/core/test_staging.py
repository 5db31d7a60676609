"""Staging is taken when it is made: using it makes a process no larger."""

from __future__ import annotations

import psutil
import pytest

from kvpp_core.staging import allocate_staging

SIZE = 256 << 20
NOISE = 16 << 20


def _resident() -> int:
    resident: int = psutil.Process().memory_info().rss
    return resident


def test_all_of_it_is_there_from_the_start() -> None:
    before = _resident()
    staging = allocate_staging(SIZE, "cpu")
    made = _resident()
    staging.fill_(1)
    assert made - before > SIZE - NOISE
    assert _resident() - made < NOISE


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_its_size_is_the_one_asked_for(size: int) -> None:
    assert allocate_staging(size, "cpu").shape == (size,)
