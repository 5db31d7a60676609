"""A benchmark prints its tables; what engines and libraries print goes to a log."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks.base import logs_aside


def chatter() -> None:
    """As Mooncake does in C++, and a child with what it inherits."""
    os.write(1, b"INFO engine starts\n")
    os.write(2, b"W1201 master is slow\n")
    os.system("echo child >&2")


def test_a_good_run_prints_what_it_prints_itself(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    with logs_aside("step"):
        chatter()
    print("the table")
    assert capfd.readouterr() == ("before\nthe table\n", "")


def test_a_failed_run_shows_the_end_of_the_log_and_keeps_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RuntimeError), logs_aside("step"):
        chatter()
        raise RuntimeError("the engine ended")
    out, err = capfd.readouterr()
    assert not out
    log = re.match(r"step failed. The end of (\S+):\n", err)
    assert log is not None
    lines = ["INFO engine starts", "W1201 master is slow", "child"]
    assert err.splitlines()[1:] == Path(log[1]).read_text().splitlines() == lines
