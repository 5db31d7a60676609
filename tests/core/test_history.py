"""Section 2.3: which blocks hold history in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpp_core.errors import KvppError
from kvpp_core.history import BlockHistory, ScheduledRequest, ScheduledStep

BLOCK = 4  # tokens


def new(name: str, blocks: list[int], computed: int = 0) -> ScheduledRequest:
    """A request that is new or resumed."""
    return ScheduledRequest(name, blocks, computed, 1, replaces=True)


def more(name: str, computed: int, *blocks: int) -> ScheduledRequest:
    """A running request that gets ``blocks`` in addition."""
    return ScheduledRequest(name, blocks, computed, 1, replaces=False)


def step(*requests: ScheduledRequest, finished: tuple[str, ...] = ()) -> ScheduledStep:
    """A step of the scheduler."""
    return ScheduledStep(requests, finished)


def observed(history: BlockHistory, scheduled: ScheduledStep) -> tuple[int, ...]:
    """The active blocks of a step, once the mirror has seen it."""
    history.observe(scheduled)
    return history.active(scheduled.requests)


def test_a_new_request_has_no_history_and_then_what_it_has_computed() -> None:
    history = BlockHistory(BLOCK)
    assert observed(history, step(new("a", [7, 3]))) == ()
    assert observed(history, step(more("a", 8, 5))) == (3, 7)
    assert observed(history, step(more("a", 9))) == (3, 5, 7)


def test_a_partly_filled_last_block_is_active() -> None:
    history = BlockHistory(BLOCK)
    history.observe(step(new("a", [7, 3, 5])))
    for computed, active in [(1, (7,)), (4, (7,)), (5, (3, 7)), (8, (3, 7)), (12, (3, 5, 7))]:
        assert observed(history, step(more("a", computed))) == active


def test_blocks_without_computed_tokens_are_not_active() -> None:
    """A chunked prefill holds blocks for tokens to come."""
    history = BlockHistory(BLOCK)
    assert observed(history, step(new("a", list(range(10)), computed=6))) == (0, 1)


def test_a_prefix_hit_is_history_of_a_new_request_and_shared_blocks_count_once() -> None:
    history = BlockHistory(BLOCK)
    history.observe(step(new("a", [1, 2])))
    assert observed(history, step(more("a", 8, 3), new("b", [1, 2, 9], computed=8))) == (1, 2)


def test_only_scheduled_requests_have_active_blocks() -> None:
    history = BlockHistory(BLOCK)
    history.observe(step(new("a", [1]), new("b", [2])))
    assert observed(history, step(more("b", 3))) == (2,)
    assert observed(history, step(more("a", 2))) == (1,)
    assert observed(history, step()) == ()


def test_a_resumed_request_has_the_blocks_it_was_given_anew() -> None:
    history = BlockHistory(BLOCK)
    history.observe(step(new("a", [1, 2])))
    assert observed(history, step(new("a", [8, 9], computed=4))) == (8,)
    assert observed(history, step(more("a", 7))) == (8, 9)


def test_the_blocks_of_a_finished_request_belong_to_who_gets_them_next() -> None:
    history = BlockHistory(BLOCK)
    history.observe(step(new("a", [1, 2])))
    assert observed(history, step(new("b", [2, 1]), finished=("a",))) == ()
    assert observed(history, step(more("b", 3))) == (2,)
    assert dict(history.blocks) == {"b": [2, 1]}


def test_a_request_may_finish_and_start_again_under_its_id_in_one_step() -> None:
    history = BlockHistory(BLOCK)
    history.observe(step(new("a", [1, 2])))
    assert observed(history, step(new("a", [5], computed=2), finished=("a",))) == (5,)
    assert dict(history.blocks) == {"a": [5]}


def test_a_finished_request_that_was_never_seen_is_ignored() -> None:
    assert observed(BlockHistory(BLOCK), step(finished=("aborted while waiting",))) == ()


def test_a_request_that_goes_on_without_having_started_is_an_error_with_its_id() -> None:
    history = BlockHistory(BLOCK)
    history.observe(step(new("a", [1])))
    with pytest.raises(KvppError, match="request b goes on, but this rank never saw it start"):
        history.observe(step(more("b", 4)))
    history.observe(step(finished=("a",)))
    with pytest.raises(KvppError, match="request a goes on"):
        history.observe(step(more("a", 4)))


def test_more_computed_tokens_than_blocks_is_an_error_with_the_figures() -> None:
    history = BlockHistory(BLOCK)
    with pytest.raises(
        KvppError, match=r"request a has 9 computed tokens, which take 3 blocks of 4 .* holds 2"
    ):
        observed(history, step(new("a", [1, 2], computed=9)))


def test_what_the_caller_does_with_its_lists_later_changes_nothing() -> None:
    history = BlockHistory(BLOCK)
    blocks = [1, 2]
    history.observe(step(new("a", blocks)))
    blocks.append(3)
    history.observe(step(more("a", 0, 4)))
    assert dict(history.blocks) == {"a": [1, 2, 4]}


@dataclass
class NaiveRequest:
    """A request of the naive model: the block that each computed or coming token lies in."""

    blocks: list[int]
    block_of_token: dict[int, int] = field(default_factory=dict)

    def lay_out(self) -> None:
        """Place the tokens one by one."""
        self.block_of_token = {
            index * BLOCK + place: block
            for index, block in enumerate(self.blocks)
            for place in range(BLOCK)
        }


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_the_mirror_equals_a_model_that_looks_at_every_token(data: st.DataObject) -> None:
    history, naive = BlockHistory(BLOCK), dict[str, NaiveRequest]()
    ids = st.lists(st.integers(0, 30), max_size=4)
    for _ in range(data.draw(st.integers(1, 8))):
        finished = data.draw(st.sets(st.sampled_from("abcd")))
        for name in finished:
            naive.pop(name, None)
        requests, active = [], set[int]()
        for name in sorted(data.draw(st.sets(st.sampled_from("abcd")))):
            replaces = name not in naive or data.draw(st.booleans())
            blocks = data.draw(ids)
            request = NaiveRequest(blocks if replaces else naive[name].blocks + blocks)
            request.lay_out()
            naive[name] = request
            computed = data.draw(st.integers(0, len(request.block_of_token)))
            active |= {request.block_of_token[token] for token in range(computed)}
            requests.append(ScheduledRequest(name, blocks, computed, 1, replaces))
        assert observed(history, ScheduledStep(requests, finished)) == tuple(sorted(active))
        assert dict(history.blocks) == {name: request.blocks for name, request in naive.items()}


def test_the_blocks_of_prefills_leave_out_what_only_decodes_read() -> None:
    """A request that adds one token to its history is a decode; a first token is none."""
    history = BlockHistory(BLOCK)
    history.observe(step(new("decode", [1, 2]), new("chunk", [2, 3, 4]), new("first", [5])))
    mixed = step(
        more("decode", 8), ScheduledRequest("chunk", (), 8, 4, replaces=False), new("first", [6])
    )
    assert observed(history, mixed) == (1, 2, 3)
    assert history.active(mixed.prefills) == (2, 3)
    assert history.active(step(more("decode", 8)).prefills) == ()
