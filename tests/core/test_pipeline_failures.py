"""Exceptions and close in the middle of a step: nothing hangs, and nothing lingers.

Two gloo ranks; rank 0 keeps layers 0..3, rank 1 layers 4..7. Failed loads and lost peers are in
tests/safety (S4, S3).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, NamedTuple

import pytest

from kvpp_core.errors import PipelineClosed
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rig import (
    ACTIVE,
    CONTROLLED,
    QUEUING,
    ControlledKind,
    DeviceKind,
    Rig,
    controlled,
    rig,
)

Exit = Literal["abort", "close", "end and close"]

EARLY = 0.3  # seconds in which a call that must wait is given the chance to return


class Interrupted(NamedTuple):
    """What a rank saw when it gave up a step with a transfer in flight."""

    early: bool  # the call returned before the transfer could end
    in_flight: int  # broadcasts that had not ended when it returned
    started_later: int  # broadcasts that were started after it had returned
    refusal: str  # of a begin() after close
    complaints: list[str]


def interrupted(rank: Rank, kind: DeviceKind, how: Exit) -> Interrupted:
    """The forward raises while layer 2 is in flight, held by its load on rank 0."""
    with rig(rank, kind) as r:
        fence: Future[None] = Future()
        r.pipeline.begin(ACTIVE, {2: fence} if r.owns(2) else None, guarded=True)
        r.forward(1, 0, 2)

        return _leave(r, how, (lambda: r.load(2, 1, fence)) if r.owns(2) else None)


def interrupted_after_last(rank: Rank, kind: ControlledKind, how: Exit) -> Interrupted:
    """All layers have been acquired, but the last one has not been received by rank 0 yet."""
    device = controlled(kind)
    with rig(rank, device) as r:
        gate = device.hold("transfer", "broadcast of layer 7")
        r.pipeline.begin(ACTIVE)
        r.forward(1)
        return _leave(r, how, gate.open)


def _leave(r: Rig, how: Exit, release: Callable[[], None] | None) -> Interrupted:
    """Abort or close in this thread; let the transfer go on from another one, later.

    The rank that has no ``release`` waits for the other rank.
    """
    returned = threading.Event()
    early = Future[bool]()

    def release_later() -> None:
        if release is None:
            early.set_result(False)
        else:
            early.set_result(returned.wait(EARLY))
            release()

    with r.background(release_later):
        if how == "end and close":
            r.pipeline.end()
        if how == "abort":
            r.pipeline.abort()
        else:
            r.pipeline.close()
        in_flight, started = r.group.in_flight, len(r.group.sent)
        returned.set()
    refusal = ""
    complaints = r.complaints()
    later = len(r.group.sent) - started
    if how == "abort":
        r.step(1)
        complaints += r.complaints()
    else:
        with pytest.raises(PipelineClosed) as refused:
            r.pipeline.begin(ACTIVE)
        refusal = str(refused.value)
    return Interrupted(early.result(), in_flight, later, refusal, complaints)


@pytest.mark.parametrize("how", ["abort", "close"])
@pytest.mark.parametrize("kind", QUEUING)
def test_abort_and_close_wait_for_the_transfer_in_flight(
    world2: GlooWorld, kind: DeviceKind, how: Exit
) -> None:
    for seen in world2.run(interrupted, kind, how):
        _assert_nothing_lingers(seen, how)


@pytest.mark.parametrize("how", ["abort", "close", "end and close"])
@pytest.mark.parametrize("kind", CONTROLLED)
def test_abort_and_close_wait_for_a_last_layer_that_was_acquired_and_not_received(
    world2: GlooWorld, kind: ControlledKind, how: Exit
) -> None:
    """Only an asynchronous device returns from acquire() that early."""
    for seen in world2.run(interrupted_after_last, kind, how):
        _assert_nothing_lingers(seen, how)


def _assert_nothing_lingers(seen: Interrupted, how: Exit) -> None:
    assert not seen.early
    assert seen.in_flight == 0
    assert seen.started_later == 0
    assert seen.complaints == []
    assert ("closed" in seen.refusal) == (how != "abort")
