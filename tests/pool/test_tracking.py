"""Which blocks are told to be saved, and when: each once, and none that a failed load has spoilt.

Field reports 2.5 (a store job reads a block at the wrong moment) and 3.1: what is filed under a key
must be what its tokens give.
Field reports 4.2 (what was computed from a failed load) and 5.1 (drafts that are not final).
"""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpp_connectors.pool.messages import BlockJob, Life
from kvpp_connectors.pool.requests import RequestState
from kvpp_core.history import ScheduledRequest

HASHES = [bytes([number] * 8) for number in range(40)]


def tracked(blocks: int = 10, done: int = 0) -> RequestState:
    """A request with blocks 100, 101, ..., of which the pool has given the first."""
    request = SimpleNamespace(block_hashes=HASHES[:blocks], request_id="request")
    state = RequestState(request, Life("request", 0), local_tokens=0)
    held = range(100, 100 + blocks)
    state.start_load(held, done, block_size=1)
    state.take_blocks(ScheduledRequest("request", held, done, 0, replaces=True))
    return state


def told(job: BlockJob | None) -> list[int]:
    """Positions in a job, whose hashes must be those of its blocks."""
    if job is None:
        return []
    assert [HASHES[block - 100] for block in job.blocks] == list(job.hashes)
    return [block - 100 for block in job.blocks]


def test_a_block_is_told_once_its_step_has_ended() -> None:
    request = tracked()
    request.scheduled(0, 0, 4)
    assert told(request.take_due(-1, 0)) == []
    request.scheduled(1, 4, 8)
    assert told(request.take_due(0, 4)) == [0, 1, 2, 3]
    assert told(request.take_due(1, 8)) == [4, 5, 6, 7]
    assert told(request.take_due(2, 8)) == []


def test_with_two_steps_under_way_it_is_told_a_step_later() -> None:
    request = tracked()
    request.scheduled(0, 0, 4)
    request.scheduled(1, 4, 8)
    assert told(request.take_due(-1, 4)) == []
    assert told(request.take_due(0, 8)) == [0, 1, 2, 3]


def test_what_a_failed_load_has_spoilt_is_not_told() -> None:
    """Blocks 2 to 5 were to be loaded and did not come; the scheduler counts two again."""
    request = tracked(done=6)
    request.scheduled(0, 6, 9)
    request.scheduled(1, 2, 6)
    assert told(request.take_due(0, 2)) == []
    request.scheduled(2, 6, 9)
    assert told(request.take_due(1, 6)) == [2, 3, 4, 5]
    assert told(request.take_due(2, 9)) == [6, 7, 8]


def test_it_is_not_told_either_where_the_request_has_to_wait_after_the_failure() -> None:
    request = tracked(done=6)
    request.scheduled(0, 6, 9)
    assert told(request.take_due(0, 2)) == []
    request.scheduled(2, 2, 9)
    assert told(request.take_due(2, 9)) == [2, 3, 4, 5, 6, 7, 8]


def test_nothing_of_a_preempted_request_is_told() -> None:
    request = tracked()
    request.scheduled(0, 0, 4)
    request.preempted(Life("request", 1))
    assert told(request.take_due(0, 4)) == []
    assert told(request.take_rest(4)) == []


def test_the_rest_is_told_at_the_end() -> None:
    request = tracked()
    request.scheduled(0, 0, 4)
    assert told(request.take_rest(4)) == [0, 1, 2, 3]
    assert request.holds


def test_blocks_that_were_there_are_not_told() -> None:
    request = tracked(done=3)
    request.scheduled(0, 3, 5)
    assert told(request.take_due(0, 5)) == [3, 4]


STEP = st.tuples(st.integers(0, 4), st.integers(0, 9), st.booleans())  # more blocks, lost, skipped


@settings(max_examples=500, deadline=None)
@given(steps=st.lists(STEP, max_size=30), lag=st.integers(1, 3), loaded=st.integers(0, 10))
def test_only_good_blocks_are_told_and_all_of_them_at_the_end(
    steps: list[tuple[int, int, bool]], lag: int, loaded: int
) -> None:
    """A model of the engine: losses are known ``lag`` steps after the step in which they happen."""
    request, computed, saved = tracked(40, done=loaded), loaded, set[int]()
    lost_in: list[tuple[int, int]] = []
    for number, (more, lost, skipped) in enumerate(steps):
        for step, position in [entry for entry in lost_in if entry[0] <= number - lag]:
            computed = min(computed, position)
            lost_in.remove((step, position))
        filled = computed
        if not skipped:
            filled = min(computed + more, 40)
            request.scheduled(number, computed, filled)
            if lost < min(loaded, computed) and number == 0:
                lost_in.append((number, lost))  # only a load can lose blocks
        spoilt = min((position for _, position in lost_in), default=40)
        due = told(request.take_due(number - lag, computed))
        assert all(position < computed for position in due)
        assert all(position < spoilt for position in due)
        saved |= set(due)
        computed = filled
    for _, position in lost_in:
        computed = min(computed, position)
    saved |= set(told(request.take_rest(computed)))
    assert saved >= set(range(loaded, computed))
