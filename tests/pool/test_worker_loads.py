"""A worker's loads: one that ends with an error has failed, none writes where a step still does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpp_connectors.connector.threads import make_executor
from kvpp_connectors.pool import worker as pool_worker_module
from kvpp_connectors.pool.messages import PoolStep
from kvpp_connectors.pool.modes.layerwise import Layerwise
from kvpp_connectors.pool.worker import PoolWorker
from tests.core.rank_memory import RankMemory, uneven_model
from tests.pool.master import wait_until
from tests.pool.stores import MemCacheStandInStore
from tests.safety.faulty_store import FaultyStore
from tests.safety.layer_pool import NAMESPACE, job_of, life_of, share_of
from tests.safety.pool_worker import pool_worker

MODES: dict[str, dict[str, Any]] = {
    "before the step": {},
    "between steps": {"load_async": True},
    "layer by layer": {"use_layerwise": True, "layerwise_prefetch_layers": 64},
}
BLOCKS = [1, 2]
PATIENCE = 20.0
EARLY = 0.2  # seconds in which what must wait is given the chance to go on


@pytest.fixture
def memory() -> RankMemory:
    """A rank without KVPP."""
    return RankMemory(uneven_model(3).placement(1, 0), 6)


@pytest.fixture
def store(tmp_path: Path, memory: RankMemory) -> Iterator[FaultyStore]:
    """One that has the blocks, whole and by layer."""
    opened = MemCacheStandInStore(tmp_path)
    store = FaultyStore(opened.backend)
    for layerwise in (False, True):
        with pool_worker(store, memory, kvpp=False, use_layerwise=layerwise) as worker:
            worker.start(PoolStep(namespace=NAMESPACE, saves=[job_of(BLOCKS)], ended=[life_of()]))
            wait_until(partial(_has_saved, worker), PATIENCE, "saved")
    yield store
    opened.close()


def _has_saved(worker: PoolWorker) -> bool:
    return worker.finished()[0] == {"r"}


def ended(worker: PoolWorker, mode: str) -> set[int]:
    """Wait for the load; the blocks that did not come."""
    if mode == "between steps":
        wait_until(lambda: "r" in worker.finished()[1], PATIENCE, "loaded")
    return worker.take_invalid_blocks()


@pytest.mark.parametrize("mode", MODES)
def test_a_load_brings_its_blocks(memory: RankMemory, store: FaultyStore, mode: str) -> None:
    with pool_worker(store, memory, kvpp=False, **MODES[mode]) as worker:
        worker.start(PoolStep(namespace=NAMESPACE, loads=[job_of(BLOCKS)]))
        assert ended(worker, mode) == set()


@pytest.mark.parametrize("mode", MODES)
def test_a_load_that_ends_with_an_error_is_a_failed_one_and_is_told(
    memory: RankMemory, store: FaultyStore, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a kind that nothing expects: the engine goes on, and the log has the traceback."""
    with pool_worker(store, memory, kvpp=False, **MODES[mode]) as worker:
        store.inject("raise", "get")
        worker.start(PoolStep(namespace=NAMESPACE, loads=[job_of(BLOCKS)]))
        assert ended(worker, mode) == set(BLOCKS)
        store.heal()
        worker.start(PoolStep(namespace=NAMESPACE, loads=[job_of([3], "s"), job_of(BLOCKS)]))
        assert ended(worker, mode) & set(BLOCKS) == set()
    told = [record for record in caplog.records if record.exc_info is not None]
    assert told and all("ended with an error" in record.getMessage() for record in told)


class MockEvent:
    """An accelerator that computes until it is let go."""

    def __init__(self) -> None:
        self.reached, self._done = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.reached.set()
        assert self._done.wait(PATIENCE)

    def let_go(self) -> None:
        self._done.set()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_loaded_while_earlier_steps_may_write_there(
    memory: RankMemory, store: FaultyStore, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that was aborted gives back blocks that a queued step still writes."""
    with pool_worker(store, memory, kvpp=False, **MODES[mode]) as worker:
        event, read = MockEvent(), store.inject("twice", "get")
        monkeypatch.setattr(pool_worker_module, "record_event", lambda _: event)
        step = PoolStep(namespace=NAMESPACE, loads=[job_of(BLOCKS)])
        starting = threading.Thread(target=worker.start, args=[step])
        starting.start()
        try:
            assert event.reached.wait(PATIENCE)
            assert not read.reached.wait(EARLY)
        finally:
            event.let_go()
        starting.join(PATIENCE)
        assert ended(worker, mode) == set()
        assert read.reached.is_set()


@pytest.mark.parametrize("missing", [[], [3]], ids=["well", "with a block that is missing"])
def test_a_load_that_ends_after_it_was_given_up_came_too_late(
    memory: RankMemory, store: FaultyStore, missing: list[int]
) -> None:
    """The other ranks were sent the layer as it was before, all of its blocks."""
    with contextlib.closing(Layerwise(share_of(store, memory), 64, memory.layout)) as loads:
        loads.start(NAMESPACE, [job_of(BLOCKS), job_of(missing, "s")])
        fences = loads.take_fences()
        assert fences is not None
        first = min(fences)
        wait_until(fences[first].done, PATIENCE, "the layer")
        loads.failed(first, late=True)
        assert loads.take_invalid_blocks() == {*BLOCKS, *missing}


def test_packing_takes_one_processor_and_leaves_the_model_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine torch's helpers are waited for: a save took twice as long.

    Also where vLLM has put something else in the place of torch's function, as on CPU.
    """
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    torch._C.set_num_threads(2)
    try:
        with make_executor("test") as thread:
            assert thread.submit(torch.get_num_threads).result(PATIENCE) == 1
        assert torch.get_num_threads() == 2
    finally:
        torch._C.set_num_threads(before)
