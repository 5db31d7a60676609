"""A process that serves patterned memory through a Transfer Engine, for tests that kill or stop it.

    python -m tests.p2p.serving_process BYTES

It prints its session and the address of its memory, and ends when standard input does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvpp_connectors.connector.transfer_engine import TransferEngine

__all__ = ["PATTERN", "Server", "serving_process"]

PATTERN = 7  # every byte that is served


@dataclass(frozen=True)
class Server:
    """The process, and where it serves what."""

    process: subprocess.Popen[str]
    session: str
    address: int

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> None:
        """SIGSTOP; returns when the process stands."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def serving_process(size: int) -> Iterator[Server]:
    """Start one that serves ``size`` bytes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.p2p.serving_process", str(size)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        session, address = process.stdout.readline().split()
        yield Server(process, session, int(address))
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def main() -> None:
    """Serve until standard input ends."""
    engine = TransferEngine("127.0.0.1", "tcp")
    memory = torch.full((int(sys.argv[1]),), PATTERN, dtype=torch.uint8)
    engine.register(memory.data_ptr(), memory.nbytes)
    print(engine.session, memory.data_ptr(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
