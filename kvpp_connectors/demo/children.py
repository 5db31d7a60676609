"""Child processes of the demo: each in a session of its own, with a log, always stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
from rich.console import Console

__all__ = ["ChildFailed", "Server", "run_module"]

_TAIL, _WIDTH = 25, 300  # log lines shown after a failure, and characters of each
_GRACE_S = 10  # for a child to end after SIGTERM


class ChildFailed(Exception):
    """A child failed. The message holds the end of its log and the log's path."""


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

    Lines that start with ``step`` are progress; all output goes to ``log``.

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
    try:  # a Ctrl-C while the thread below starts ends the child, too
        threading.Thread(target=_stop_descendants, args=(child,), daemon=True).start()
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


class Server:
    """A child that serves until it is stopped; a context manager that stops it."""

    def __init__(
        self, command: Sequence[str], *, title: str, log: Path, environment: Mapping[str, str]
    ) -> None:
        self._title, self._log = title, log
        with log.open("a") as file:
            self._child = subprocess.Popen(
                list(command),
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise `ChildFailed` if the server has ended."""
        if (code := self._child.poll()) is not None:
            raise self.failure(f"ended with exit code {code}")

    def failure(self, what: str) -> ChildFailed:
        """The error ``what`` about this server, with the end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()[-_TAIL:]
        tail = [line[:_WIDTH] for line in lines]  # vLLM logs its whole configuration in one line
        return ChildFailed("\n".join([f"{self._title}: {what}. The end of {self._log}:", *tail]))

    def stop(self) -> None:
        """SIGTERM the server and its descendants; SIGKILL after a grace period."""
        _stop(self._child)

    def kill(self) -> None:
        """SIGKILL the server and its descendants."""
        self.signal(signal.SIGKILL)
        self._child.wait()

    def signal(self, sign: signal.Signals) -> None:
        """Send a signal to the server and its descendants."""
        os.killpg(self._child.pid, sign)

    def processes(self) -> list[psutil.Process]:
        """The server and its descendants."""
        own = psutil.Process(self._child.pid)
        return [own, *own.children(recursive=True)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _stop_descendants(child: subprocess.Popen[str]) -> None:
    """Once the child has ended, stop its descendants: they would hold its output open."""
    child.wait()
    _stop(child)


def _stop(child: subprocess.Popen[Any]) -> None:
    """Stop the child and its descendants: they share its session."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
        except ProcessLookupError:
            return
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
