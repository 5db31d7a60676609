"""Failed loads, exceptions, close and lost peers: every rank is told, nothing hangs or lingers.

Two gloo ranks; rank 0 keeps layers 0..3, rank 1 layers 4..7. Every scenario runs on the CPU device
and on the simulated one.
Field report 4.2: a failed load is told everywhere.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, NamedTuple

import pytest
import torch

from kvpp_core.errors import KvppError, LoadFailed, PipelineClosed, TransferTimeout
from kvpp_core.policy import BroadcastPolicy
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rig import (
    ACTIVE,
    CONTROLLED,
    PATIENCE,
    QUEUING,
    ControlledKind,
    DeviceKind,
    Rig,
    abandon,
    controlled,
    make_rig,
    rig,
)

How = Literal["fails", "is cancelled", "takes too long"]
Exit = Literal["abort", "close", "end and close"]

SOON = 0.2  # seconds, a bound that is meant to run out
EARLY = 0.3  # seconds in which a call that must wait is given the chance to return


class Failure(NamedTuple):
    """What a rank saw of a failed load."""

    message: str  # of LoadFailed; empty when nothing was raised
    cause: str  # its cause
    load_failures: int  # as counted
    complaints: list[str]  # bytes that were wrong in the step or the next one


class Interrupted(NamedTuple):
    """What a rank saw when it gave up a step with a transfer in flight."""

    early: bool  # the call returned before the transfer could end
    in_flight: int  # broadcasts that had not ended when it returned
    started_later: int  # broadcasts that were started after it had returned
    refusal: str  # of a begin() after close
    complaints: list[str]


def failed_load(rank: Rank, kind: DeviceKind, layer: int, how: How) -> Failure:
    """The owner's load of ``layer`` goes wrong; both ranks abort and run a normal step."""
    with rig(rank, kind, load_timeout=SOON if how == "takes too long" else PATIENCE) as r:
        fence: Future[None] = Future()
        owned = r.owns(layer)
        r.pipeline.begin(ACTIVE, {layer: fence} if owned else None, guarded=True)
        r.forward(1, 0, layer)
        if owned and how == "fails":
            r.settle()
            fence.set_exception(ConnectionError("the pool is gone"))
        elif owned and how == "is cancelled":
            r.settle()
            fence.cancel()
        return _failure(r, layer)


def failed_load_told(
    rank: Rank, kind: DeviceKind, layer: int, how: How
) -> tuple[list[int], int, list[str]]:
    """The same where somebody wants to be told: layers told of, failures, wrong bytes elsewhere.

    As in a model's forward, in inference mode; the fence is completed by another thread.
    """
    told: list[int] = []
    load_timeout = SOON if how == "takes too long" else PATIENCE
    with torch.inference_mode(), rig(rank, kind, load_timeout=load_timeout) as r:
        fence: Future[None] = Future()
        owned = r.owns(layer)

        def complete() -> None:
            if owned and how == "fails":
                fence.set_exception(ConnectionError("the pool is gone"))
            elif owned and how == "is cancelled":
                fence.cancel()

        r.pipeline.begin(
            ACTIVE, {layer: fence} if owned else None, guarded=True, on_load_failed=told.append
        )
        r.forward(1, 0, layer)
        r.settle()
        with r.background(complete):
            r.acquire(layer)
        r.forward(1, layer + 1)
        r.pipeline.end()
        complaints = r.complaints()
        r.step(1)
        return told, r.pipeline.stats.load_failures, complaints + r.complaints()


def load_after_its_time(rank: Rank, kind: DeviceKind) -> Failure:
    """The load of layer 0 ends after its time, when the bytes before it have been broadcast."""
    with rig(rank, kind, policy=BroadcastPolicy.FULL, load_timeout=SOON) as r:
        fence: Future[None] = Future()
        r.pipeline.begin(ACTIVE, {0: fence} if r.owns(0) else None, guarded=True)
        if r.owns(0):
            r.device.transfer.record().wait(PATIENCE)
            r.load(0, 2, fence)
        return _failure(r, 0)


def _failure(r: Rig, layer: int) -> Failure:
    message = cause = ""
    try:
        r.acquire(layer)
        r.read(layer, generation=2)
    except LoadFailed as error:
        message, cause = str(error), repr(error.__cause__)
    complaints = r.complaints()
    r.pipeline.abort()
    for ordinal in r.memory.placement.owned:
        r.write(ordinal, generation=3)
    r.step(3)
    return Failure(message, cause, r.pipeline.stats.load_failures, complaints + r.complaints())


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


@pytest.mark.parametrize("how", ["fails", "is cancelled", "takes too long"])
@pytest.mark.parametrize("layer", [0, 2, 5])
@pytest.mark.parametrize("kind", QUEUING)
def test_a_failed_load_raises_on_every_rank_and_the_next_step_is_right(
    world2: GlooWorld, kind: DeviceKind, layer: int, how: How
) -> None:
    results = world2.run(failed_load, kind, layer, how)
    for failure in results:
        verb = "did not end within" if how == "takes too long" else "failed"
        assert f"the load of layer {layer} {verb}" in failure.message
        assert f"its owner, rank {layer // 4}" in failure.message
        assert failure.load_failures == 1
        assert failure.complaints == []
    causes = {"fails": "ConnectionError('the pool is gone')", "is cancelled": "CancelledError()"}
    assert results[layer // 4].cause == causes.get(how, "None")
    assert results[1 - layer // 4].cause == "None"


@pytest.mark.parametrize("how", ["fails", "is cancelled", "takes too long"])
@pytest.mark.parametrize("layer", [0, 2, 5])
@pytest.mark.parametrize("kind", QUEUING)
def test_a_failed_load_is_told_on_every_rank_and_the_step_goes_on(
    world2: GlooWorld, kind: DeviceKind, layer: int, how: How
) -> None:
    assert world2.run(failed_load_told, kind, layer, how) == [([layer], 1, [])] * 2


@pytest.mark.parametrize("kind", QUEUING)
def test_a_load_that_ends_after_its_time_is_not_taken_for_good(
    world2: GlooWorld, kind: DeviceKind
) -> None:
    """The bytes before the load have been sent: nobody may believe them."""
    for failure in world2.run(load_after_its_time, kind):
        assert "the load of layer 0 did not end within" in failure.message
        assert failure.complaints == []


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


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("guarded", [False, True], ids=["", "with loads"])
@pytest.mark.parametrize("kind", QUEUING)
def test_a_peer_that_never_joins_is_a_timeout_that_names_layer_and_owner(
    world2: GlooWorld, kind: DeviceKind, lost: int, guarded: bool
) -> None:
    """After it the pipeline refuses to go on: what hangs may still write the buffer."""
    seen = world2.run(lost_peer, kind, lost, leaves=False, guarded=guarded)[1 - lost]
    assert seen is not None
    for message in (seen.acquire, seen.abort) if seen.acquire else (seen.abort,):
        assert ("the load status of layer 0" if guarded else "the broadcast of layer 0") in message
        assert "from rank 0" in message
    assert bool(seen.acquire) == (kind == "cpu" or guarded)
    _assert_refuses(seen)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("kind", QUEUING)
def test_a_peer_that_is_gone_is_an_error_before_the_time_is_over(
    world2: GlooWorld, kind: DeviceKind, lost: int
) -> None:
    """On the CPU it names the layer; the simulated device shows torch's own error."""
    seen = world2.run(lost_peer, kind, lost, leaves=True, guarded=False)[1 - lost]
    assert seen is not None
    if kind == "cpu":
        assert "the broadcast of layer 0" in seen.acquire
        assert "from rank 0" in seen.acquire
    _assert_refuses(seen)


def _assert_refuses(seen: Lost) -> None:
    assert "broken" in seen.begin
    assert "broken" in seen.touch
    assert seen.seconds < PATIENCE
