"""A block is saved when the store says so: what it refused, lost or never got is put again.

A scheduler half and a worker half together, over stores of this process and over Mooncake for real.
The prompt is found in the local prefix cache each time but the first, as vLLM finds it.
Field reports 2.5, 4.3, 4.4 and 4.5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpp_connectors.pool.facts import PoolFacts
from kvpp_connectors.pool.keys import Namespace, Topology
from kvpp_connectors.pool.lookup import Lookup
from kvpp_connectors.pool.messages import BlockJob, Life, PoolStep
from kvpp_connectors.pool.scheduler import PoolScheduler
from kvpp_connectors.pool.stats import PoolStats
from tests.core.rank_memory import RankMemory, uneven_model
from tests.pool.master import Master, wait_until
from tests.pool.stores import MemCacheStandInStore, MooncakeUnderTest
from tests.pool.test_keys import BASE
from tests.pool.test_scheduler import BLOCK, StandInRequest, facts, output
from tests.safety.faulty_store import FaultyStore
from tests.safety.pool_worker import pool_worker

WAIT_S = 60.0
BLOCKS = 3  # full ones of the prompt
PROMPT = BLOCKS * BLOCK + 1
HASHES = [bytes([number] * 32) for number in range(1, BLOCKS + 1)]
NAMESPACE = Namespace(BASE, Topology.replicated([["layer"]]))
LAYERWISE = pytest.mark.parametrize("layerwise", [False, True], ids=["whole blocks", "layers"])


class Engine:
    """Both halves, one rank, one prompt."""

    def __init__(self, store: FaultyStore, layerwise: bool, memory: RankMemory) -> None:
        self._layerwise = layerwise
        self._store = store
        self._stack = contextlib.ExitStack()
        self.worker = self._stack.enter_context(
            pool_worker(store, memory, kvpp=False, use_layerwise=layerwise)
        )
        settings: PoolFacts = facts(use_layerwise=layerwise)
        self.scheduler = PoolScheduler(settings, Lookup(store.exist, PoolStats("test"), 5.0))
        self._stack.callback(self.scheduler.close)
        self.scheduler.use(NAMESPACE)

    @property
    def stored(self) -> int:
        """Blocks of the prompt that a lookup would find."""
        keys = [NAMESPACE.required_keys(found, self._layerwise)[0] for found in HASHES]
        return sum(self._store.exist(keys))

    def request(self, name: str) -> StandInRequest:
        """One with the prompt."""
        return StandInRequest(name, PROMPT, PROMPT, block_hashes=list(HASHES))

    def prefill(self, request: StandInRequest, local: int) -> None:
        """The step that computes what neither the prefix cache (``local`` blocks) nor the pool
        has."""
        pooled = self.scheduler.external_tokens(request, local * BLOCK)
        assert pooled is not None
        blocks = list(range(BLOCKS + 1))
        self.scheduler.allocated(request, blocks, pooled)
        computed = local * BLOCK + pooled
        new = SimpleNamespace(
            req_id=request.request_id, block_ids=(blocks,), num_computed_tokens=computed
        )
        decided = output([new])
        decided.num_scheduled_tokens[request.request_id] = PROMPT - computed
        self.step(decided)
        request.num_computed_tokens = PROMPT

    def step(self, decided: Any) -> None:
        """A step of the engine."""
        step = self.scheduler.build_step(decided)
        self.worker.release(step.preempted)
        self.worker.start(step)
        assert not self.worker.take_invalid_blocks()

    def finish(self, request: StandInRequest) -> None:
        """The request ends well; its saves have ended afterwards."""
        held = self.scheduler.finished(request, ended_well=True)
        self.step(output())
        if held:
            wait_until(lambda: request.request_id in self.worker.finished()[0], WAIT_S, "saved")

    def run(self, name: str, local: int = 0) -> None:
        """A whole request."""
        request = self.request(name)
        self.prefill(request, local)
        self.finish(request)

    def close(self) -> None:
        """End both halves."""
        self._stack.close()


@contextlib.contextmanager
def engine_of(store: FaultyStore, layerwise: bool) -> Iterator[Engine]:
    memory = RankMemory(uneven_model(3).placement(1, 0), 6)
    with contextlib.closing(Engine(store, layerwise, memory)) as engine:
        yield engine


@LAYERWISE
def test_a_put_that_was_refused_is_made_again_by_the_next_request(
    tmp_path: Path, layerwise: bool
) -> None:
    store = FaultyStore(MemCacheStandInStore(tmp_path).backend)
    with engine_of(store, layerwise) as engine:
        store.inject("fail", "put")
        engine.run("first")
        assert engine.stored == 0
        store.heal()
        engine.run("second", local=BLOCKS)
        assert engine.stored == BLOCKS


@LAYERWISE
def test_a_put_that_the_store_took_and_lost_is_made_again(tmp_path: Path, layerwise: bool) -> None:
    store = FaultyStore(MemCacheStandInStore(tmp_path).backend)
    with engine_of(store, layerwise) as engine:
        store.inject("drop", "put")
        engine.run("first")
        assert engine.stored == 0
        store.heal()
        engine.run("second", local=BLOCKS)
        assert engine.stored == BLOCKS


@LAYERWISE
def test_an_object_that_was_evicted_is_put_again(tmp_path: Path, layerwise: bool) -> None:
    """And no other: what the store has is neither packed nor sent."""
    opened = MemCacheStandInStore(tmp_path)
    store = FaultyStore(opened.backend)
    with engine_of(store, layerwise) as engine:
        engine.run("first")
        assert engine.stored == BLOCKS
        for key in NAMESPACE.required_keys(HASHES[1], layerwise):
            opened.remove(key)
        assert engine.stored == BLOCKS - 1
        others = store.inject("raise", "put", HASHES[2].hex())
        engine.run("second", local=BLOCKS)
        assert engine.stored == BLOCKS
        assert not others.reached.is_set()


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_a_mark_does_not_stand_for_layers_that_are_gone(tmp_path: Path, which: int) -> None:
    """Lookups keep marks alive, and not what they stand for: layers are evicted before them."""
    opened = MemCacheStandInStore(tmp_path)
    store = FaultyStore(opened.backend)
    with engine_of(store, layerwise=True) as engine:
        engine.run("first")
        gone = layer_keys(opened, HASHES[1])[which]
        opened.remove(gone)
        engine.run("second", local=BLOCKS)
        assert store.exist([gone]) == [True]


def test_a_layer_that_a_load_has_missed_is_put_again(tmp_path: Path) -> None:
    """Whichever it is: the block is computed anew, although its mark is there."""
    opened = MemCacheStandInStore(tmp_path)
    store = FaultyStore(opened.backend)
    with engine_of(store, layerwise=True) as engine:
        engine.run("first")
        gone = layer_keys(opened, HASHES[1])[2]
        opened.remove(gone)
        job = BlockJob(Life("second", 9), tuple(range(BLOCKS)), tuple(HASHES))
        engine.worker.start(PoolStep(NAMESPACE, loads=[job]))
        assert engine.worker.take_invalid_blocks() == {1}
        engine.worker.start(PoolStep(NAMESPACE, saves=[job], ended=[job.life]))
        wait_until(lambda: engine.worker.finished()[0] == {"second"}, WAIT_S, "saved")
        assert store.exist([gone]) == [True]


def layer_keys(store: MemCacheStandInStore, block_hash: bytes) -> list[str]:
    """Of the layers of a block that are stored, in the order in which they were."""
    return [key for key in store.pool.objects if f"@{block_hash.hex()}@pp0r0@t" in key]


@LAYERWISE
def test_a_request_that_is_preempted_before_its_save_is_saved_when_it_resumes(
    tmp_path: Path, layerwise: bool
) -> None:
    """It finds its own blocks in the local prefix cache."""
    store = FaultyStore(MemCacheStandInStore(tmp_path).backend)
    with engine_of(store, layerwise) as engine:
        request = engine.request("r")
        engine.prefill(request, local=0)
        request.num_computed_tokens = 0
        engine.step(output(preempted=["r"]))
        assert engine.stored == 0
        engine.prefill(request, local=BLOCKS)
        engine.finish(request)
        assert engine.stored == BLOCKS


@pytest.mark.parametrize("local", [BLOCKS, 1], ids=["all of it is found here", "a part"])
def test_what_a_restarted_store_has_lost_is_put_by_the_next_request(local: int) -> None:
    """mooncake_master is killed and comes back empty, and no call has noticed it."""
    master = Master()
    opened = MooncakeUnderTest(master, packed=True)
    store = FaultyStore(opened.backend)
    try:
        with engine_of(store, layerwise=False) as engine:
            engine.run("first")
            assert engine.stored == BLOCKS
            master.kill()
            master.start()
            wait_until(lambda: master.capacity() > 0, WAIT_S, "the client joins the new master")
            assert engine.stored == 0
            engine.run("second", local=local)
            assert engine.stored == BLOCKS
    finally:
        opened.close()
        master.stop()
