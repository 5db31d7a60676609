"""Signals to the processes of a group, which a test has started."""

from __future__ import annotations

import os
import signal
import time

import psutil

__all__ = ["signal_group"]

_BOUND_S = 30.0


def signal_group(group: int, number: int) -> None:
    """Send it; returns from SIGSTOP when all stand.

    A thread of a busy process may take up the signal long after another one has answered a request.
    """
    os.killpg(group, number)
    ends = time.monotonic() + _BOUND_S
    while number == signal.SIGSTOP and not _stands(group):
        assert time.monotonic() < ends, f"group {group} did not stop within {_BOUND_S:g} s"
        time.sleep(0.01)


def _stands(group: int) -> bool:
    ended = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return all(process.status() in ended for process in _members(group))


def _members(group: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group:
                members.append(process)
        except ProcessLookupError:
            continue
    return members
