"""S9: preemption and eviction wait for saves that read the block, or cancel them.

Workers: a real worker half over real backends saves blocks, the store is held up, and the blocks
are taken away; every object must hold what the blocks held before. The scheduler: requests preempt
each other while saves are under way and before they are told. Injected: puts that are held, fail,
raise, are lost or come twice. Field reports 2.5, 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kvpp_connectors.pool.block_objects import HEADER_BYTES
from kvpp_connectors.pool.keys import Namespace, Shard
from kvpp_connectors.pool.messages import PoolStep
from kvpp_connectors.pool.packing import Inventory
from tests.core.rank_memory import RankMemory, uneven_model
from tests.core.rig import PATIENCE
from tests.pool.block_stores import objects, opened
from tests.pool.master import wait_until
from tests.pool.stores import MemCacheStandInStore, StoreUnderTest
from tests.pool.test_keys import BASE, KVPP
from tests.pool.test_packing import expected
from tests.safety.faulty_store import FaultyStore, What
from tests.safety.layer_pool import job_of, life_of
from tests.safety.pool_worker import pool_worker
from tests.safety.site import Kind, Launch, Site
from tests.safety.workers import BLOCK, Ending

SHARD = Shard(0, 0)
EARLY = 0.2  # seconds in which a release that must wait is given the chance to return
FIRST, SECOND, OTHER = job_of([0, 1]), job_of([2, 3]), job_of([4], "other")


@pytest.fixture
def memory() -> RankMemory:
    """Rank 0 of two, and what it computed."""
    memory = RankMemory(uneven_model(5).placement(2, 0), 6)
    memory.store_owned(1)
    memory.store_drafts(1)
    return memory


@pytest.mark.parametrize("then", [None, "fail", "twice", "reverse"])
def test_blocks_are_given_up_when_no_save_reads_them_any_more(
    store: StoreUnderTest, prefix: str, memory: RankMemory, then: What | None
) -> None:
    """The second save waits for its turn while the first is held: it has not been read at all."""
    space = Namespace(replace(BASE, revision=prefix), KVPP)
    faulty = FaultyStore(store.backend)
    held = faulty.inject("hold", "put", space.block_key(FIRST.hashes[0], SHARD))
    if then is not None:
        faulty.inject(then, "put", space.block_key(FIRST.hashes[1], SHARD))
    with (
        pool_worker(faulty, memory, kvpp=True) as worker,
        ThreadPoolExecutor(1) as scheduler,
    ):
        worker.start(PoolStep(space, saves=[FIRST, SECOND]))
        assert held.reached.wait(PATIENCE)
        worker.release([life_of("nobody"), life_of("other")])  # nothing reads theirs
        released = scheduler.submit(worker.release, [life_of()])
        try:
            with pytest.raises(TimeoutError):
                released.result(EARLY)
        finally:
            held.open()
        released.result(PATIENCE)
        memory.store_owned(2)  # whoever got the blocks
        memory.store_drafts(2)
        worker.start(PoolStep(space, saves=[OTHER], ended=[life_of("other")]))
        wait_until(lambda: worker.finished()[0] == {"other"}, PATIENCE, "the last save")
        inventory = Inventory.kept(memory.placement)
        lost = [FIRST.blocks[1]] if then == "fail" else []
        for job in (FIRST, SECOND):
            for block, found in zip(job.blocks, job.hashes, strict=True):
                key = space.block_key(found, SHARD)
                assert store.backend.exist([key]) == [block not in lost]
                if block not in lost:
                    wanted = expected(inventory, block, writer=0).numpy().tobytes()
                    assert store.read(key)[HEADER_BYTES:] == wanted


def test_saves_of_an_ended_life_and_of_the_next_are_counted_apart(
    tmp_path: Path, memory: RankMemory
) -> None:
    """An id is used again while the saves of its first request are under way."""
    faulty = FaultyStore(MemCacheStandInStore(tmp_path).backend)
    space = Namespace(BASE, KVPP)
    held = faulty.inject("hold", "put", space.block_key(SECOND.hashes[0], SHARD))
    again = replace(SECOND, life=life_of("r", 1))
    with pool_worker(faulty, memory, kvpp=True) as worker, ThreadPoolExecutor(1) as scheduler:
        worker.start(PoolStep(space, saves=[FIRST], ended=[FIRST.life]))
        worker.start(PoolStep(space, saves=[again]))
        wait_until(lambda: worker.finished()[0] == {"r"}, PATIENCE, "the end of the first life")
        assert held.reached.wait(PATIENCE)
        released = scheduler.submit(worker.release, [again.life])
        try:
            with pytest.raises(TimeoutError):
                released.result(EARLY)
        finally:
            held.open()
        released.result(PATIENCE)
        assert worker.finished()[0] == set()


def test_a_save_has_read_its_blocks_when_it_says_so(
    store: StoreUnderTest, prefix: str, memory: RankMemory
) -> None:
    """Of several batches the last decides: the blocks are somebody else's from that moment on."""

    def given_away() -> None:
        memory.store_owned(2)
        memory.store_drafts(2)

    blocks = [5, 0, 3, 1, 2]
    saved = opened(store, memory).save(objects(prefix, blocks), given_away)
    assert all(outcome.ok for outcome in saved)
    for block in blocks:
        wanted = expected(Inventory.kept(memory.placement), block, writer=0).numpy().tobytes()
        assert store.read(f"{prefix}{block}")[HEADER_BYTES:] == wanted


def test_a_save_that_ends_with_an_error_holds_nobody(tmp_path: Path, memory: RankMemory) -> None:
    """Neither a preemption nor the request's end."""
    faulty = FaultyStore(MemCacheStandInStore(tmp_path).backend)
    space = Namespace(BASE, KVPP)
    beyond = job_of([2, 99])  # no such block
    with pool_worker(faulty, memory, kvpp=True) as worker:
        worker.start(PoolStep(space, saves=[beyond], ended=[life_of()]))
        worker.release([life_of()])
        worker.start(PoolStep(space, saves=[beyond], ended=[life_of()]))
        wait_until(lambda: worker.finished()[0] == {"r"}, PATIENCE, "the end of the request")


# In the scheduler --------------------------------------------------------------------------------

NONE = Ending()


@pytest.fixture(scope="module")
def launch(mla_model: Path) -> Launch:
    """A pool."""
    return Launch(mla_model, Kind(pool=True))


@pytest.fixture
def site(launch: Launch) -> Iterator[Site]:
    """With blocks for two short requests, which do not suffice for their answers."""
    site = Site(launch, 11)
    yield site
    site.close()


@pytest.mark.parametrize("ends", [False, True], ids=["saves are held", "saves end"])
@pytest.mark.parametrize("later", range(3))
@pytest.mark.parametrize("tail", range(0, BLOCK, 3))
def test_preempted_requests_are_saved_from_their_own_blocks_or_not_at_all(
    site: Site, tail: int, later: int, ends: bool
) -> None:
    """`Site` checks what every save reads, whenever it ends, and every answer."""
    ending = Ending(good=frozenset(range(8 if ends else 0)))
    site.arrive("a", [*range(3 * BLOCK), *[7] * (tail + 1)], 40, remote=False)
    for _ in range(later):
        site.step(ending)
    site.arrive("b", [*range(100, 100 + 4 * BLOCK), *[8] * (16 - tail)], 40, remote=False)
    for _ in range(60):
        site.step(ending)
    assert site.preempted.total()
    site.drain()


def test_blocks_of_an_ended_request_stay_until_its_save_has_read_them(site: Site) -> None:
    """Eviction takes them from the prefix cache afterwards."""
    prompt = [*range(4 * BLOCK)]
    site.arrive("a", prompt, 1, remote=False)
    site.step(NONE)
    site.step(NONE)
    assert site.workers.under_way and "a" in site.finished
    site.arrive("b", [9] * 8 * BLOCK, 1, remote=False)
    for _ in range(10):
        site.step(NONE)
    assert "b" not in site.finished, "it had to wait"
    site.drain()
    assert set(site.store) and site.freed["a"] == 1
