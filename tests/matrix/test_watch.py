"""Replicas that wait for a lost one are ended in seconds, and the reason is what is reported."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fork_server import CONTEXT, become_a_leader
from tests.matrix.run import MOVED, watch

pytestmark = pytest.mark.process

BOUND_S = 60.0  # the watch is given ten times as long


def _waits(log: Path) -> None:
    become_a_leader(log)
    time.sleep(10 * BOUND_S)


def _ends(log: Path) -> None:
    become_a_leader(log)
    raise ValueError("no memory left")


def _moves(log: Path) -> None:
    become_a_leader(log)
    print(MOVED, flush=True)
    time.sleep(10 * BOUND_S)


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        (_ends, "on-1 ended with exit code 1: ValueError: no memory left"),
        (_moves, "on-1 found its port taken and went to another one, where nobody asks"),
    ],
)
def test_the_peers_of_a_lost_replica_are_ended_and_say_why(
    tmp_path: Path, lost: object, reason: str
) -> None:
    started = time.monotonic()
    replicas = {}
    for name, target in (("on-0", _waits), ("on-1", lost)):
        replicas[name] = CONTEXT.Process(target=target, args=(tmp_path / f"{name}.log",))
        replicas[name].start()
    watch([replicas], tmp_path, limit=10 * BOUND_S)
    assert time.monotonic() - started < BOUND_S
    assert not any(process.is_alive() for process in replicas.values())
    assert f"ReplicaError: killed, because {reason}" in (tmp_path / "on-0.log").read_text()


def test_an_engine_that_does_not_end_is_ended_at_the_limit(tmp_path: Path) -> None:
    process = CONTEXT.Process(target=_waits, args=(tmp_path / "off-0.log",))
    process.start()
    watch([{"off-0": process}], tmp_path, limit=1.0)
    assert "no end within 1 s" in (tmp_path / "off-0.log").read_text()
