"""Child processes of the demo: started in a session of their own, logged, and always stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

__all__ = ["ChildFailed", "run_module"]

_TAIL = 25  # log lines shown after a failure
_GRACE_S = 10  # for a child to end after SIGTERM


class ChildFailed(Exception):
    """A child ended badly. The message holds the end of its log and the log's path."""


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    title: str,
    log: Path,
    environment: Mapping[str, str],
    console: Console,
) -> None:
    """Run ``python -m module`` to its end, showing its last progress line.

    Lines that start with ``step`` are progress; everything is kept in ``log``.

    Raises:
        ChildFailed: the child's exit code was not 0.
    """
    tail: deque[str] = deque(maxlen=_TAIL)
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    assert child.stdout is not None
    try:  # from here on: a Ctrl-C while the thread below starts must end the child, too
        threading.Thread(target=_stop_when_over, args=(child,), daemon=True).start()
        with log.open("w") as file, console.status(f"{title}: starting") as status:
            for line in child.stdout:
                file.write(line)
                tail.append(line)
                if line.startswith("step "):
                    status.update(f"{title}: {line.strip()}")
        code = child.wait()
    finally:
        _stop(child)
    if code != 0:
        raise ChildFailed(f"{title}: exit code {code}. The end of {log}:\n{''.join(tail)}")


def _stop_when_over(child: subprocess.Popen[str]) -> None:
    """Once the child has ended, end what it left behind: that would hold its output open."""
    child.wait()
    _stop(child)


def _stop(child: subprocess.Popen[str]) -> None:
    """End the child and whatever it started: workers share its session."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
        except ProcessLookupError:
            return
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
