"""What the remaining rank of two sees when the other one is lost.

In a module of its own, because spawned ranks import it: it needs torch alone.
"""

from __future__ import annotations

import gc
import time
from typing import NamedTuple

import pytest

from kvpp_core.errors import KvppError, PipelineClosed, TransferTimeout
from tests.core.gloo_world import Rank
from tests.core.rig import ACTIVE, PATIENCE, DeviceKind, abandon, make_rig

__all__ = ["Lost", "lost_peer"]

SOON = 0.2  # seconds, a bound that is meant to run out


class Lost(NamedTuple):
    """What the remaining rank saw."""

    acquire: str  # error of acquire(), where it waits on the host
    abort: str  # error of abort()
    begin: str  # error of the next begin()
    touch: str  # error of an acquire() after that
    seconds: float


def lost_peer(
    rank: Rank, kind: DeviceKind, lost: int, *, leaves: bool, guarded: bool
) -> Lost | None:
    """Rank ``lost`` does not take part in the step; if it ``leaves``, it closes its connections."""
    r = make_rig(rank, kind, timeout=PATIENCE if leaves else SOON, load_timeout=SOON)
    error = KvppError if leaves else TransferTimeout
    if rank.rank == lost:
        if leaves:
            r.close()
            del r
            gc.collect()  # gloo closes its connections when the group's last reference goes
        else:
            abandon(r)
        rank.barrier()
        return None
    abandon(r)
    started = time.monotonic()
    acquire = ""
    r.pipeline.begin(ACTIVE, guarded=guarded)
    if kind == "cpu" or guarded:  # an asynchronous device waits for load status on the host only
        with pytest.raises(error) as raised:
            r.acquire(0)
        acquire = str(raised.value)
    with pytest.raises(RuntimeError) as aborted:
        r.pipeline.abort()
    with pytest.raises(PipelineClosed) as refused:
        r.pipeline.begin(ACTIVE)
    with pytest.raises(PipelineClosed) as untouchable:
        r.acquire(0)
    with pytest.raises(RuntimeError):
        r.pipeline.close()
    r.pipeline.close()
    seconds = time.monotonic() - started
    rank.barrier()
    return Lost(acquire, str(aborted.value), str(refused.value), str(untouchable.value), seconds)
