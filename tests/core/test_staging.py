"""Staging is taken when it is made: using it makes a process no larger."""

from __future__ import annotations

import gc

import psutil
import pytest

from kvpp_core.transfer import allocate_staging

SIZE = 256 << 20
NOISE = 16 << 20


def _resident() -> int:
    resident: int = psutil.Process().memory_info().rss
    return resident


def test_all_of_it_is_there_from_the_start() -> None:
    gc.collect()
    before = _resident()
    staging = allocate_staging(SIZE, "cpu")
    made = _resident()
    staging.fill_(1)
    assert made - before > SIZE - NOISE
    assert _resident() - made < NOISE


@pytest.mark.parametrize("alignment", [1, 64, 2 << 20])
def test_it_starts_where_it_may_be_registered(alignment: int) -> None:
    """Mooncake on NPUs takes whole multiples of 2 MiB; headers lie at the very start."""
    for _ in range(3):
        staging = allocate_staging(4096, "cpu", alignment)
        assert staging.data_ptr() % alignment == 0 and staging.shape == (4096,)


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_its_size_is_the_one_asked_for(size: int) -> None:
    assert allocate_staging(size, "cpu").shape == (size,)
