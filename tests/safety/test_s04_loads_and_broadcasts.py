"""S4: a layer is broadcast only after its owner's load; a failed load reaches every rank.

Broadcasts: two gloo ranks, rank 0 keeps layers 0..3, rank 1 layers 4..7, alone and with the pool's
own loads over a store. The scheduler: what a failed load leaves in a block is nobody's KV, also
where the request that would compute it in its next step is gone before. Injected: loads that are
late, fail, are cancelled, end after their time, are lost by a store that says they went well, come
twice or in another order. Field reports 4.2, 5.3.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import pytest
import torch

from kvpp_core.device.base import Device, Fence
from kvpp_core.device.cpu import CpuDevice, CpuStream
from kvpp_core.errors import LoadFailed
from kvpp_core.policy import BroadcastPolicy
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rig import (
    ACTIVE,
    DEVICES,
    PATIENCE,
    QUEUING,
    DeviceKind,
    Rig,
    assert_right,
    assert_wrong,
    controlled,
    rig,
)

if TYPE_CHECKING:
    from tests.safety.faulty_store import What
    from tests.safety.site import Launch, Site

How = Literal["fails", "is cancelled", "takes too long"]
SOON = 0.2  # seconds, a bound that is meant to run out
LATE = 0.2  # seconds


def late_load(rank: Rank, kind: DeviceKind, layer: int) -> list[str]:
    """The owner's load of ``layer`` ends only when the transfer has gone as far as it can."""
    with rig(rank, kind) as r:
        fence: Future[None] = Future()
        owned = r.owns(layer)

        def load() -> None:
            r.settle()
            r.load(layer, 2, fence)

        with r.when_the_host_waits(load) if owned else nullcontext(load) as load_now:
            r.pipeline.begin(ACTIVE, {layer: fence} if owned else None, guarded=True)
            r.forward(1, 0, layer)
            if owned:
                load_now()
            r.acquire(layer)
        r.read(layer, generation=2)
        r.forward(1, layer + 1)
        r.pipeline.end()
        return r.complaints()


class _NoFences(CpuStream):
    """A CPU transfer stream without the ordering under test."""

    def wait_fence(self, fence: Fence, timeout: float, what: str) -> None:
        """Do not wait."""


def unfenced_load(rank: Rank, kind: DeviceKind, layer: int) -> list[str]:
    """`late_load`, with transfers that do not wait for fences.

    The pipeline notices that it has sent a layer before its load: LoadFailed, its second line of
    defence. What the receivers hold then is the bytes before the load.
    """
    device: Device
    if kind == "cpu":
        device = CpuDevice(PATIENCE)
        device.transfer = _NoFences()
    else:
        device = controlled(kind, break_fence=True)
    with rig(rank, device) as r:
        fence: Future[None] = Future()
        owned = r.owns(layer)
        r.pipeline.begin(ACTIVE, {layer: fence} if owned else None, guarded=True)
        r.forward(1, 0, layer)
        if owned:
            r.settle()
            r.load(layer, 2, fence)
        with pytest.raises(LoadFailed):
            r.acquire(layer)
        r.pipeline.abort()
        r.read(layer, generation=2)
        return r.complaints()


def all_layers_loaded(rank: Rank, kind: DeviceKind) -> list[str]:
    """One loader thread per rank loads the rank's layers one by one during the step."""
    with rig(rank, kind) as r:
        fences: dict[int, Future[None]] = {layer: Future() for layer in range(8) if r.owns(layer)}

        def load_all() -> None:
            for layer, fence in fences.items():
                r.load(layer, 2, fence)

        with r.background(load_all):
            r.step(2, fences, guarded=True)
        return r.complaints()


class Failure(NamedTuple):
    """What a rank saw of a failed load."""

    message: str  # of LoadFailed; empty when nothing was raised
    cause: str  # its cause
    load_failures: int  # as counted
    complaints: list[str]  # bytes that were wrong in the step or the next one


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
            ACTIVE,
            {layer: fence} if owned else None,
            guarded=True,
            on_load_failed=lambda layer, late: told.append(layer),
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


class Loaded(NamedTuple):
    """What a rank saw of a step that loads all its layers from a pool."""

    told: list[int]  # layers that were not loaded
    invalid: set[int]  # blocks that this rank reported
    complaints: list[str]  # bytes that were not those in the pool


def step_from_pool(rank: Rank, what: What | None, layer: int, prefetch: int) -> Loaded:
    """Every rank saves its layers, forgets them, and loads them in a step; ``layer`` has a fault.

    The fault is in the middle block of the step's. What a failed layer holds is not read.
    """
    from tests.safety.layer_pool import NAMESPACE, job_of, layer_pool

    told: list[int] = []
    with rig(rank, "cpu") as r, layer_pool(r.memory, prefetch) as pool:
        job, owned = job_of(ACTIVE), r.memory.placement.owned
        for generation in (2, 1):
            for ordinal in owned:
                r.memory.store(ordinal, generation, ACTIVE)
            if generation == 2:
                pool.save(job)
        if what is not None and r.owns(layer):
            key = "" if what == "hold" else f"@{job.hashes[1].hex()}@{pool.shard.tag}"
            fault = pool.store.inject(what, "get", key + pool.part(layer))
            threading.Timer(LATE, fault.open).start()
        pool.loads.start(NAMESPACE, [job])
        fences = pool.loads.take_fences()
        r.pipeline.begin(
            ACTIVE,
            fences,
            guarded=fences is not None,
            on_load_failed=lambda layer, late: told.append(layer),
        )
        for ordinal in range(r.layers):
            pool.loads.reached(ordinal)
            r.acquire(ordinal)
            if ordinal not in told:
                r.read(ordinal, generation=2)
        r.pipeline.end()
        return Loaded(told, pool.loads.take_invalid_blocks(), r.complaints())


@pytest.mark.parametrize("layer", [0, 2, 5])
@pytest.mark.parametrize("kind", DEVICES)
def test_a_layer_is_broadcast_after_its_late_load(
    world2: GlooWorld, kind: DeviceKind, layer: int
) -> None:
    assert_right(world2.run(late_load, kind, layer))


@pytest.mark.parametrize("kind", DEVICES)
def test_twin_without_waiting_for_the_fence_receivers_get_the_bytes_before_the_load(
    world2: GlooWorld, kind: DeviceKind
) -> None:
    assert_wrong(world2.run(unfenced_load, kind, 2), "layers.2.")


@pytest.mark.parametrize("kind", DEVICES)
def test_one_thread_may_load_all_layers_while_the_forward_waits_for_them(
    world2: GlooWorld, kind: DeviceKind
) -> None:
    assert_right(world2.run(all_layers_loaded, kind))


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


@pytest.mark.parametrize("prefetch", [0, 1, 8])
@pytest.mark.parametrize("layer", [0, 3, 5])
@pytest.mark.parametrize("what", [None, "hold", "fail", "drop", "twice", "reverse"])
def test_a_step_from_a_pool_has_the_pools_bytes_or_says_which_it_has_not(
    world2: GlooWorld, what: What | None, layer: int, prefetch: int
) -> None:
    """On every rank: bytes of all layers that are not named; the owner names the block."""
    lost = what in ("fail", "drop")
    for number, seen in enumerate(world2.run(step_from_pool, what, layer, prefetch)):
        assert seen.told == ([layer] if lost else [])
        assert seen.invalid == ({ACTIVE[1]} if lost and number == layer // 4 else set())
        assert seen.complaints == []


# In the scheduler --------------------------------------------------------------------------------

PROMPT = [*range(64), 7, 7]  # four blocks and two tokens


@pytest.fixture(scope="module")
def launch(mla_model: Path) -> Launch:
    """A pool whose loads end within their step."""
    from tests.safety.site import Kind, Launch

    return Launch(mla_model, Kind(pool=True))


@pytest.fixture
def site(launch: Launch) -> Iterator[Site]:
    """An engine that finds all of PROMPT in the pool."""
    from tests.safety.site import Site

    site = Site(launch, 40)
    site.save(PROMPT, 4)
    yield site
    site.close()


def ends_right(site: Site, *names: str) -> None:
    """`Site` compares each answer with the right one."""
    site.drain()
    assert {site.finished[name] for name in names} == {"length"}


def test_a_failed_load_is_computed(site: Site) -> None:
    site.arrive("a", PROMPT, 4, remote=False)
    site.step_with_failing_loads()
    ends_right(site, "a")


@pytest.mark.parametrize("tail", [0, 40], ids=["as long", "longer"])
def test_blocks_of_a_request_that_is_aborted_before_it_computes_them(site: Site, tail: int) -> None:
    site.arrive("a", PROMPT, 4, remote=False)
    site.step_with_failing_loads()
    site.abort("a")
    site.arrive("b", [*PROMPT, *[9] * tail], 4, remote=False)
    ends_right(site, "b")


def test_what_was_computed_after_them_is_not_used_either(site: Site) -> None:
    """Whole blocks that the same step filled from them are cached as well."""
    longer = [*PROMPT, *[9] * 40]
    site.arrive("a", longer, 4, remote=False)
    site.step_with_failing_loads()
    site.abort("a")
    site.arrive("b", longer, 4, remote=False)
    ends_right(site, "b")


def test_a_request_that_shares_them_in_the_same_step(site: Site) -> None:
    """vLLM has the first of the two compute them for both."""
    for name in ("a", "b"):
        site.arrive(name, PROMPT, 4, remote=False)
    site.step_with_failing_loads()
    site.abort("a")
    ends_right(site, "b")
