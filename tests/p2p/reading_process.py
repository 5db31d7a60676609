"""A process that reads a server's memory with short timeouts, for tests whose peer stands still.

    python -m tests.p2p.reading_process SESSION ADDRESS CHUNKS WINDOW

It says "reading" when some chunks have arrived, and when it is told to go on goes on, and says the
outcome. Told again, it reads once more from the same peer, and says how many bytes of the first
read were written after its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvpp_connectors.connector.transfer_engine import Read, TransferEngine
from kvpp_connectors.p2p.read_window import read_all
from tests.p2p.serving_process import PATTERN

__all__ = ["CHUNK", "EMPTY", "Local", "Reader", "local_for", "reading_process"]

CHUNK = 1 << 20  # bytes
EMPTY = 0xEE
PATIENCE = 90.0  # seconds
TIMEOUTS = {
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
}


@dataclass
class Local:
    """Memory that is read into, and the reads of all of a server's memory."""

    memory: torch.Tensor
    reads: list[Read]

    @property
    def arrived(self) -> int:
        """Chunks whose last byte is there."""
        return int((self.memory[:, -1] == PATTERN).sum())


def local_for(session: str, address: int, chunks: int) -> Local:
    """A read of CHUNK bytes for each chunk."""
    memory = torch.full((chunks, CHUNK), EMPTY, dtype=torch.uint8)
    reads = [Read(session, address + i * CHUNK, memory[i].data_ptr(), CHUNK) for i in range(chunks)]
    return Local(memory, reads)


@dataclass(frozen=True)
class Reader:
    """The process."""

    process: subprocess.Popen[bytes]

    def says(self) -> Any:
        """Its next word."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], PATIENCE)[0], "it says nothing"
        return json.loads(self.process.stdout.readline())

    def go_on(self) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def reading_process(session: str, address: int, chunks: int, window: int) -> Iterator[Reader]:
    """Start one."""
    words = (session, address, chunks, window)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.p2p.reading_process", *map(str, words)],
        cwd=Path(__file__).parents[2],
        env=os.environ | TIMEOUTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    try:
        yield Reader(process)
    finally:
        process.kill()
        process.wait(30)


def main() -> None:
    """Read, say how it ended, and look for late bytes."""
    session, address, chunks, window = sys.argv[1], *map(int, sys.argv[2:])
    engine = TransferEngine("127.0.0.1", "tcp")
    local = local_for(session, address, chunks)
    told: list[bool] = []

    def tell_and_wait_once() -> None:
        if not told and local.arrived >= 4:
            told.append(True)
            _say("reading")
            sys.stdin.readline()

    outcome = read_all(engine, local.reads, window, tell_and_wait_once)
    local.memory.fill_(EMPTY)
    _say({"done": outcome.done_bytes, "problem": outcome.problem})
    sys.stdin.readline()
    fresh = local_for(session, address, 1)
    deadline, again = time.monotonic() + PATIENCE, None
    while again is None or (again.problem is not None and time.monotonic() < deadline):
        again = read_all(engine, fresh.reads, 1, lambda: None)  # the first may meet a broken lane
    _say({"fresh read": again.problem, "late bytes": int((local.memory != EMPTY).sum())})


def _say(word: object) -> None:
    print(json.dumps(word), flush=True)


if __name__ == "__main__":
    main()
