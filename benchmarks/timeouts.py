"""Bounds for benchmarks: a slow machine is slow, not wrong."""

from __future__ import annotations

import os

__all__ = ["ANSWER_S", "be_patient"]

ANSWER_S = 60.0  # for what a process beside us answers at once, if it gets the processor
_MOONCAKE = {
    "MC_RPC_TIMEOUT_MS": "60000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "60",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "60",
    "MC_TRANSFER_TIMEOUT": "60",
}


def be_patient() -> None:
    """Give Mooncake bounds above those of serving, here and in processes that are started.

    Before it is imported: it reads them once. What the environment has already is kept.
    """
    for name, value in _MOONCAKE.items():
        os.environ.setdefault(name, value)
