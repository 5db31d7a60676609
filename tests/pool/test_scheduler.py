"""The scheduler half: one lookup, one load, saves of good blocks, and blocks freed once.

Field reports 2.4 (late, repeated and unknown messages) and 2.8 (asked again after preemption). The
requests and outputs of vLLM's scheduler are stand-ins with the fields that are read.
Field reports 2.5 (saves of blocks that are not there), 2.6 (an idle engine) and 4.6 (full hits).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvpp_connectors.pool.facts import PoolFacts
from kvpp_connectors.pool.keys import Fingerprint, Namespace, Topology
from kvpp_connectors.pool.lookup import Lookup
from kvpp_connectors.pool.options import PoolOptions
from kvpp_connectors.pool.scheduler import PoolScheduler
from kvpp_connectors.pool.stats import PoolStats

BLOCK = 16


@dataclass
class StandInRequest:
    """What is read of a vLLM request."""

    request_id: str = "r"
    num_prompt_tokens: int = 100
    num_tokens: int = 100
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=lambda: [bytes([n] * 8) for n in range(6)])


def facts(saves: bool = True, **options: Any) -> PoolFacts:
    """An engine of one rank that loads and saves."""
    return PoolFacts(
        options=PoolOptions(lookup_deadline_s=5.0, lookup_wait_s=1.0, **options),
        extra={},
        loads=True,
        saves=saves,
        block_size=BLOCK,
        heads_split_over=1,
        device_type="cpu",
        lag=1,
    )


NAMESPACE = Namespace(
    Fingerprint("m", "main", "n", "", "f", "float32", "", "MLA", BLOCK, "sha256", "0"),
    Topology.replicated([["layer"]]),
)


class StandInPool:
    """A store that has the first ``blocks`` blocks."""

    def __init__(self) -> None:
        self.blocks = 4
        self.asked = 0

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """By the hash in the key."""
        self.asked += 1
        return [int(key.split("@")[3][:2], 16) < self.blocks for key in keys]


@pytest.fixture
def pool() -> StandInPool:
    return StandInPool()


@pytest.fixture
def scheduler(pool: StandInPool) -> Iterator[PoolScheduler]:
    lookup = Lookup(pool.exist, PoolStats("test"), 5.0)
    half = PoolScheduler(facts(), lookup)
    half.use(NAMESPACE)
    yield half
    half.close()


def output(
    new: Sequence[Any] = (),
    cached: Sequence[Any] = (),
    preempted: Sequence[str] = (),
    **tokens: int,
) -> Any:
    """A SchedulerOutput. ``cached`` are (name, computed tokens, new blocks)."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached],
            num_computed_tokens=[computed for _, computed, _ in cached],
            new_block_ids=[(blocks,) for _, _, blocks in cached],
            resumed_req_ids=set(),
        ),
        preempted_req_ids=set(preempted),
        finished_req_ids=set(),
    )


def test_a_block_that_another_request_computes_anew_is_saved_when_that_has_ended(
    scheduler: PoolScheduler, pool: StandInPool
) -> None:
    """A load fails, and both requests of the step have its blocks; vLLM lets the second one go on
    counting them, for the first computes them in the next step."""
    first, second = StandInRequest("first"), StandInRequest("second")
    tokens = scheduler.external_tokens(first, 0)
    assert tokens == 4 * BLOCK
    scheduler.allocated(first, [*range(10, 17)], tokens)
    assert scheduler.external_tokens(second, 6 * BLOCK) == 0
    scheduler.allocated(second, [*range(10, 16), 20], 0)
    new = [
        SimpleNamespace(req_id="first", block_ids=([*range(10, 17)],), num_computed_tokens=64),
        SimpleNamespace(req_id="second", block_ids=([*range(10, 16), 20],), num_computed_tokens=96),
    ]
    scheduler.build_step(output(new, first=36, second=4))
    scheduler.failed([12])
    first.num_computed_tokens, second.num_computed_tokens = 2 * BLOCK, 6 * BLOCK
    again: list[Any] = [("first", 2 * BLOCK, []), ("second", 6 * BLOCK, [])]
    step = scheduler.build_step(output((), again, first=100 - 2 * BLOCK, second=4))
    assert [(job.request_id, job.blocks) for job in step.saves] == [("second", (10, 11))]
    first.num_computed_tokens = second.num_computed_tokens = 100
    step = scheduler.build_step(output())
    assert [(job.request_id, job.blocks) for job in step.saves] == [
        ("first", (12, 13, 14, 15)),
        ("second", (12, 13, 14, 15)),
    ]


def first_step(scheduler: PoolScheduler, request: StandInRequest) -> Any:
    """Ask, allocate, and schedule the rest of the prompt; what the workers are told."""
    tokens = scheduler.external_tokens(request, 0)
    assert tokens is not None
    scheduler.allocated(request, list(range(10, 17)), tokens)
    new = SimpleNamespace(req_id="r", block_ids=([*range(10, 17)],), num_computed_tokens=tokens)
    return scheduler.build_step(output([new], r=100 - tokens))


def test_what_the_pool_has_is_loaded_and_the_rest_is_saved(scheduler: PoolScheduler) -> None:
    request = StandInRequest()
    step = first_step(scheduler, request)
    (load,) = step.loads
    assert (load.blocks, list(load.hashes)) == ((10, 11, 12, 13), request.block_hashes[:4])
    assert not step.saves
    request.num_computed_tokens = 100
    assert scheduler.finished(request, ended_well=True)
    last = scheduler.build_step(output())
    assert [job.blocks for job in last.saves] == [(14, 15)]
    assert [life.request_id for life in last.ended] == ["r"]
    assert not scheduler.build_step(output()).ended


def test_a_whole_prompt_is_loaded_but_for_its_last_token(
    scheduler: PoolScheduler, pool: StandInPool
) -> None:
    pool.blocks = 6
    request = StandInRequest(num_prompt_tokens=96, num_tokens=96)
    assert scheduler.external_tokens(request, 0) == 95
    scheduler.allocated(request, list(range(10, 16)), 95)
    (load,) = scheduler.build_step(output()).loads
    assert load.blocks == (10, 11, 12, 13, 14, 15)


def test_what_is_there_locally_is_not_asked_for(scheduler: PoolScheduler) -> None:
    assert scheduler.external_tokens(StandInRequest(), 3 * BLOCK) == BLOCK


def test_a_failed_load_is_not_tried_again(scheduler: PoolScheduler) -> None:
    """The store may go on saying that it has what it cannot give."""
    request = StandInRequest()
    first_step(scheduler, request)
    assert scheduler.external_tokens(request, 0) == 0


def test_a_preempted_request_may_load_again_and_saves_nothing_of_before(
    scheduler: PoolScheduler,
) -> None:
    request = StandInRequest()
    first_step(scheduler, request)
    step = scheduler.build_step(output(preempted=["r"]))
    assert [life.request_id for life in step.preempted] == ["r"]
    assert not step.saves
    assert scheduler.external_tokens(request, 0) == 4 * BLOCK


def test_an_engine_that_only_loads_asks_again_after_a_preemption(pool: StandInPool) -> None:
    """A kv_consumer: its pool has what the preemption took away."""
    half = PoolScheduler(facts(saves=False), Lookup(pool.exist, PoolStats("test"), 5.0))
    half.use(NAMESPACE)
    try:
        request = StandInRequest()
        assert len(first_step(half, request).loads) == 1
        half.build_step(output(preempted=["r"]))
        assert half.external_tokens(request, 0) == 4 * BLOCK
        half.allocated(request, list(range(20, 27)), 4 * BLOCK)
        (load,) = half.build_step(output()).loads
        assert load.blocks == (20, 21, 22, 23)
    finally:
        half.close()


def test_an_id_that_is_used_again_starts_a_new_life(scheduler: PoolScheduler) -> None:
    """2.4: whatever the first request has left, also where its end was never told."""
    lives = []
    for _ in range(3):
        request = StandInRequest()
        step = first_step(scheduler, request)
        lives += [step.loads[0].life]
        assert scheduler.external_tokens(request, 0) == 0, "it has had its load"
    assert len(set(lives)) == 3 and {life.request_id for life in lives} == {"r"}
    assert not scheduler.finished(request, ended_well=False)
    assert not scheduler.finished(request, ended_well=False)


def test_an_answer_that_comes_after_its_request_counts_for_no_other(pool: StandInPool) -> None:
    """2.4: the id has gone to a request with another prompt."""
    gate = threading.Event()

    def exist(keys: Sequence[str]) -> list[bool]:
        assert gate.wait(20)
        return pool.exist(keys)

    half = PoolScheduler(facts(), Lookup(exist, PoolStats("test"), 20.0))
    half.use(NAMESPACE)
    try:
        assert half.external_tokens(StandInRequest(), 0) is None
        other = StandInRequest(block_hashes=[bytes([n] * 8) for n in range(90, 96)])
        half.build_step(output())
        assert half.external_tokens(other, 0) is None
        gate.set()
        half.build_step(output())
        assert half.external_tokens(other, 0) == 0
        assert not half.finished(other, ended_well=False)
    finally:
        gate.set()
        half.close()


def test_a_preempted_request_that_ends_is_reported_once(scheduler: PoolScheduler) -> None:
    """2.4: one that is aborted while it loads again is named by its load, and by nothing else.

    vLLM frees a request at the first report and dies at the second.
    """
    request = StandInRequest()
    first_step(scheduler, request)
    request.num_computed_tokens = 100
    assert scheduler.build_step(output()).saves
    scheduler.build_step(output(preempted=["r"]))
    scheduler.allocated(request, list(range(20, 27)), scheduler.external_tokens(request, 0) or 0)
    assert scheduler.build_step(output()).loads
    assert not scheduler.finished(request, ended_well=False)
    assert not scheduler.build_step(output()).ended


def test_an_aborted_request_saves_nothing_and_holds_nothing(scheduler: PoolScheduler) -> None:
    request = StandInRequest()
    first_step(scheduler, request)
    assert not scheduler.finished(request, ended_well=False)
    step = scheduler.build_step(output())
    assert (step.saves, step.ended) == ([], [])


def test_unknown_and_repeated_ends_are_harmless(scheduler: PoolScheduler) -> None:
    request = StandInRequest()
    assert not scheduler.finished(request, ended_well=True)
    first_step(scheduler, request)
    assert scheduler.finished(request, ended_well=False) is False
    assert not scheduler.finished(request, ended_well=True)


def test_another_child_that_loads_is_not_doubled(scheduler: PoolScheduler) -> None:
    """Field report 2.9: a child that was not chosen gets blocks and no tokens."""
    request = StandInRequest()
    assert scheduler.external_tokens(request, 0)
    scheduler.allocated(request, list(range(10, 17)), 0)
    assert not scheduler.build_step(output()).loads


def test_all_lookups_of_a_step_wait_no_longer_than_one(pool: StandInPool) -> None:
    """Requests that arrive together do not add up: what one has waited the next has less."""
    gate = threading.Event()

    def exist(keys: Sequence[str]) -> list[bool]:
        assert gate.wait(20)
        return pool.exist(keys)

    lookup = Lookup(exist, PoolStats("test"), 5.0)
    half = PoolScheduler(facts(), lookup)
    half.use(NAMESPACE)
    try:
        waits = []
        for number in range(20):
            request = StandInRequest(request_id=f"r{number}")
            began = time.monotonic()
            assert half.external_tokens(request, 0) is None
            waits.append(time.monotonic() - began)
        wait_s = facts().options.lookup_wait_s
        assert waits[0] >= wait_s and sum(waits) < 2 * wait_s
        half.build_step(output())
        gate.set()
        assert half.external_tokens(StandInRequest(request_id="r0"), 0) == 4 * BLOCK
    finally:
        gate.set()
        half.close()


def test_nothing_is_asked_before_the_objects_have_names(pool: StandInPool) -> None:
    lookup = Lookup(pool.exist, PoolStats("test"), 5.0)
    half = PoolScheduler(facts(), lookup)
    assert half.external_tokens(StandInRequest(), 0) == 0
    assert not half.build_step(output()).saves
    half.close()
    assert not pool.asked
