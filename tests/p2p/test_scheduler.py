"""What is offered and what is pulled, decided beside vLLM's scheduler.

Field reports 2.2 (decode never comes), 2.4 (unknown and late messages), 2.8 (a request that was
preempted asks again), 5.1 (look-ahead blocks), 8.2 (foolish transfer data from a client).
Requests are SimpleNamespaces with the five attributes that the scheduler halves look at.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpp_connectors.p2p.messages import Pull, WorkerHandshake
from kvpp_connectors.p2p.protocol import WorkerAddress
from kvpp_connectors.p2p.scheduler import DecodeScheduler, PrefillScheduler
from tests.p2p.sides import BLOCK_SIZE, engine_facts, eventually, listening, request

WORKER = WorkerAddress("127.0.0.1", 15000, "epoch")
TOKENS = 5 * BLOCK_SIZE + 3
BLOCKS = [4, 9, 2, 7, 1, 3]
ASKED = {"do_remote_decode": True}


@pytest.fixture
def prefill() -> Iterator[PrefillScheduler]:
    """One with a worker."""
    scheduler = PrefillScheduler(engine_facts("prefill", tp=2, pp=2))
    scheduler.set_handshakes({(0, 0): WorkerHandshake([WORKER])})
    with contextlib.closing(scheduler):
        yield scheduler


@pytest.fixture
def decode(prefill: PrefillScheduler) -> Iterator[DecodeScheduler]:
    """One, which is closed before the prefill side that it tells so."""
    with contextlib.closing(DecodeScheduler(engine_facts("decode"))) as scheduler:
        yield scheduler


def offered(prefill: PrefillScheduler, tokens: int = TOKENS) -> dict[str, Any]:
    """kv_transfer_params of a request with BLOCKS."""
    params = prefill.finished(request(tokens, ASKED), list(BLOCKS))
    assert params is not None
    return params


def let_go(prefill: PrefillScheduler, params: dict[str, Any]) -> bool:
    """Whether an offer's request is freed, and alone, at last."""
    names: list[str] = eventually(prefill.pop_released)
    return names == [params["remote_request_id"]]


class TestPrefill:
    """What is offered, and what a lease holds."""

    @pytest.mark.parametrize("tokens", [1, 15, 16, 17, 95, 96])
    def test_it_offers_exactly_the_blocks_of_the_prompt(
        self, tokens: int, prefill: PrefillScheduler
    ) -> None:
        """5.1: not the blocks for drafted or looked-ahead tokens."""
        blocks = list(range(100, 120))
        params = prefill.finished(request(tokens, ASKED, num_computed_tokens=tokens + 4), blocks)
        assert params is not None
        count = -(-tokens // BLOCK_SIZE)
        assert params["remote_block_ids"] == [blocks[:count]]
        assert params["num_prompt_blocks"] == count
        assert params["remote_num_tokens"] == tokens

    def test_it_says_what_proxies_and_other_connectors_look_for(
        self, prefill: PrefillScheduler
    ) -> None:
        """facts/ascend.md 7: the keys of NIXL and vllm-ascend, and ours in one field."""
        params = offered(prefill)
        assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
        assert (params["tp_size"], params["pp_size"], params["remote_pcp_size"]) == (2, 2, 1)
        assert params["kvpp"]["workers"] == [{"host": "127.0.0.1", "port": 15000, "epoch": "epoch"}]
        assert params["kvpp"]["transfer_id"] == params["remote_request_id"]

    @pytest.mark.parametrize(
        "unasked",
        [
            request(TOKENS, None),
            request(TOKENS, {}),
            request(TOKENS, {"do_remote_decode": False}),
            request(TOKENS, {"do_remote_prefill": True}),
            request(TOKENS, ASKED, num_computed_tokens=TOKENS - 1),
            request(TOKENS, ASKED, num_computed_tokens=0),
        ],
    )
    def test_it_offers_nothing_that_was_not_asked_for_or_not_computed(
        self, unasked: Any, prefill: PrefillScheduler
    ) -> None:
        """8.3: an aborted prompt is no KV; and it holds nothing."""
        assert prefill.finished(unasked, BLOCKS) is None
        assert prefill.counts()["leases_granted"] == 0

    @pytest.mark.parametrize("words", ["text", ["list"], 7, 1.5, True, [[]], "", 0, False])
    def test_params_that_are_no_object_offer_nothing(
        self, words: Any, prefill: PrefillScheduler
    ) -> None:
        """8.2: a client's JSON value of any kind; it is computed and answered as without."""
        with listening() as lines:
            assert prefill.finished(request(TOKENS, words), BLOCKS) is None
        assert len(lines) == 1 and "no object" in lines[0]

    def test_expiry_needs_no_traffic(self) -> None:
        """2.2, 2.6: decode never comes; the blocks are free after the lease's time."""
        facts = engine_facts("prefill", options={"lease_seconds": 0.2})
        with contextlib.closing(PrefillScheduler(facts)) as prefill:
            params = offered(prefill)
            assert prefill.pop_released() == []
            assert let_go(prefill, params)
            assert prefill.pop_released() == []
            assert prefill.counts()["leases_expired"] == 1

    def test_workers_are_named_in_the_order_of_their_ranks(self, prefill: PrefillScheduler) -> None:
        """3.1: whatever order their handshakes came in, PCP ranks within."""
        ports = iter(range(1, 9))
        handshakes: dict[tuple[int, ...], WorkerHandshake] = {
            ranks: WorkerHandshake([WorkerAddress("h", next(ports), "e") for _ in range(2)])
            for ranks in [(1, 1), (0, 0), (1, 0), (0, 1)]
        }
        prefill.set_handshakes(handshakes)
        workers = offered(prefill)["kvpp"]["workers"]
        assert [worker["port"] for worker in workers] == [3, 4, 7, 8, 5, 6, 1, 2]


class TestDecode:
    """What is pulled, and what becomes of the lease where nothing is."""

    def test_a_request_is_pulled_once(
        self, decode: DecodeScheduler, prefill: PrefillScheduler
    ) -> None:
        """2.8: after it was preempted it is computed here; P has long let its blocks go."""
        asked = request(TOKENS, offered(prefill))
        decode.arrived(asked)
        assert [decode.external_tokens(asked, 0) for _ in range(3)] == [TOKENS] * 3
        decode.allocated(asked, list(range(10)), TOKENS)
        [[pull], cancelled] = decode.take_step()
        assert pull.remote_blocks == tuple(BLOCKS) and pull.local_blocks == tuple(range(6))
        assert cancelled == []
        assert decode.external_tokens(asked, 0) == 0
        decode.allocated(asked, list(range(10)), 0)
        decode.received({asked.request_id})
        for computed in (0, BLOCK_SIZE):
            assert decode.external_tokens(asked, computed) == 0
            decode.allocated(asked, list(range(20, 30)), 0)
        decode.ended(asked)
        assert decode.take_step() == ([], [])

    @pytest.mark.parametrize("blocks_here", range(1, 6))
    def test_blocks_that_decode_has_are_not_pulled(
        self, blocks_here: int, decode: DecodeScheduler, prefill: PrefillScheduler
    ) -> None:
        """A prefix of the prompt is in the local cache."""
        asked = request(TOKENS, offered(prefill))
        decode.arrived(asked)
        external = decode.external_tokens(asked, blocks_here * BLOCK_SIZE)
        assert external == TOKENS - blocks_here * BLOCK_SIZE
        decode.allocated(asked, list(range(50, 60)), external)
        [[pull], _] = decode.take_step()
        assert pull.remote_blocks == tuple(BLOCKS[blocks_here:])
        assert pull.local_blocks == tuple(range(50 + blocks_here, 56))

    def test_a_prompt_that_is_all_here_releases_the_lease(
        self, decode: DecodeScheduler, prefill: PrefillScheduler
    ) -> None:
        """2.2: at once, not after the lease's time."""
        params = offered(prefill)
        asked = request(TOKENS, params)
        decode.arrived(asked)
        assert decode.external_tokens(asked, TOKENS) == 0
        decode.allocated(asked, BLOCKS, 0)
        assert decode.take_step() == ([], [])
        assert let_go(prefill, params)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"num_prompt_tokens": TOKENS + 1}, f"{TOKENS} tokens were prefilled and the prompt"),
            ({"num_prompt_tokens": TOKENS - 1}, f"has {TOKENS - 1}; do both sides use the same"),
            ({}, f"blocks of {BLOCK_SIZE} tokens, this side of 32"),
        ],
    )
    def test_another_prompt_or_block_size_is_computed_here_and_released(
        self, changes: dict[str, int], said: str, prefill: PrefillScheduler
    ) -> None:
        """1.2, 2.2, 2.8: both values in one log line; P frees at once."""
        facts = engine_facts("decode", block_size=BLOCK_SIZE if changes else 32)
        params = offered(prefill)
        asked = request(changes.get("num_prompt_tokens", TOKENS), params)
        with contextlib.closing(DecodeScheduler(facts)) as decode, listening() as lines:
            decode.arrived(asked)
            assert decode.external_tokens(asked, 0) == 0
            assert let_go(prefill, params)
        assert len(lines) == 1 and "computed here" in lines[0] and said in lines[0]

    def test_a_request_that_ends_before_its_pull_releases_the_lease(
        self, decode: DecodeScheduler, prefill: PrefillScheduler
    ) -> None:
        """2.2: the client left while the request was queued; once, and it is not cancelled."""
        params = offered(prefill)
        asked = request(TOKENS, params)
        decode.arrived(asked)
        for _ in range(2):
            decode.ended(asked)
        assert decode.external_tokens(asked, 0) == 0
        assert decode.take_step() == ([], [])
        assert let_go(prefill, params)

    def test_a_request_that_ends_while_it_is_pulled_is_cancelled_once(
        self, decode: DecodeScheduler, prefill: PrefillScheduler
    ) -> None:
        """2.4: whichever step the abort falls into; nothing is cancelled after the pull's end."""
        asked = request(TOKENS, offered(prefill))
        decode.arrived(asked)
        decode.allocated(asked, BLOCKS, TOKENS)
        assert len(decode.take_step()[0]) == 1
        for _ in range(2):
            decode.ended(asked)
        assert decode.take_step() == ([], [asked.request_id])
        decode.received({asked.request_id})
        for _ in range(2):
            decode.received({asked.request_id})
            decode.ended(asked)
        assert decode.take_step() == ([], [])

    def test_unknown_and_late_requests_are_harmless(self, decode: DecodeScheduler) -> None:
        """2.4: requests without an offer, and what nobody asked for."""
        plain = request(TOKENS)
        for _ in range(2):
            decode.arrived(plain)
            assert decode.external_tokens(plain, 0) == 0
            decode.allocated(plain, BLOCKS, 0)
            decode.received({plain.request_id, "nobody"})
            decode.ended(plain)
        assert decode.take_step() == ([], [])

    def test_every_order_of_events_gives_one_pull_at_most(
        self, decode: DecodeScheduler, prefill: PrefillScheduler
    ) -> None:
        """2.4: all sequences of five events on one request; no exception, one pull, one cancel."""
        params = offered(prefill)
        count = 0

        def play(trace: tuple[str, ...]) -> tuple[list[Pull], list[str]]:
            nonlocal count
            count += 1
            asked = request(TOKENS, params)
            pulls, cancelled = [], []
            for event in trace:
                if event == "arrive":
                    decode.arrived(asked)
                elif event == "allocate":
                    decode.allocated(asked, BLOCKS, decode.external_tokens(asked, 0))
                elif event == "receive":
                    decode.received({asked.request_id})
                elif event == "end":
                    decode.ended(asked)
                else:
                    step = decode.take_step()
                    pulls += step[0]
                    cancelled += step[1]
            decode.ended(asked)
            step = decode.take_step()
            return pulls + step[0], cancelled + step[1]

        events = ("allocate", "receive", "end", "step")
        traces: list[tuple[str, ...]] = [("arrive",)]
        for _ in range(4):
            traces += [(*trace, event) for trace in traces for event in events]
        for trace in set(traces):
            pulls, cancelled = play(trace)
            assert len(pulls) <= 1 and len(cancelled) <= 1, trace
            if cancelled:
                assert pulls[0].request_id == cancelled[0]
        assert count > 300


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=10)
    | st.just("\ud800")
    | st.sampled_from([-1, 0, 1 << 70, 1e400]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
PATHS = [
    ("remote_engine_id",), ("remote_host",), ("remote_port",), ("remote_block_ids",),
    ("remote_block_ids", 0), ("remote_block_ids", 0, 3), ("remote_num_tokens",),
    ("remote_block_size",), ("kvpp",), ("kvpp", "version"), ("kvpp", "transfer_id"),
    ("kvpp", "generation"), ("kvpp", "workers"), ("kvpp", "workers", 0),
    ("kvpp", "workers", 0, "host"), ("kvpp", "workers", 0, "port"), ("kvpp", "workers", 0, "epoch"),
]  # fmt: skip


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(path=st.sampled_from(PATHS), value=JSON, drop=st.booleans())
def test_damaged_params_are_computed_here_or_still_an_offer(
    path: tuple[Any, ...], value: Any, drop: bool, decode: DecodeScheduler
) -> None:
    """8.2: one value of any kind in any place, or none there; a log line where it is refused."""
    params = copy.deepcopy(GOOD)
    inner: Any = params
    for key in path[:-1]:
        inner = inner[key]
    if drop:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    assert_harmless(decode, params)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(params=JSON | st.dictionaries(st.sampled_from([p[0] for p in PATHS]), JSON))
def test_params_of_any_kind_are_computed_here(params: Any, decode: DecodeScheduler) -> None:
    """8.2: what is no offer at all."""
    if isinstance(params, dict):
        params["do_remote_prefill"] = True
    assert_harmless(decode, params)


GOOD: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_engine_id": "P",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_block_ids": [list(BLOCKS)],
    "remote_num_tokens": TOKENS,
    "remote_block_size": BLOCK_SIZE,
    "kvpp": {
        "version": 1,
        "transfer_id": "t",
        "generation": 1,
        "workers": [{"host": "127.0.0.1", "port": 1, "epoch": "e"}],
    },
}


def assert_harmless(decode: DecodeScheduler, params: Any) -> None:
    """Either it is an offer, or it is computed here and the log says so, in one line."""
    asked = request(TOKENS, params)
    with listening() as lines:
        decode.arrived(asked)
    said = [line for line in lines if asked.request_id in line]
    refused = decode.external_tokens(asked, 0) == 0
    assert refused == (len(said) == 1 and "computed here" in said[0]) or params is None
    assert all(len(line) < 2000 for line in said)
    decode._heartbeat.remove(asked.request_id)
    decode.ended(asked)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kvpp": GOOD["kvpp"] | {"version": 2}}, "version 2, this side 1"),
        ({"remote_block_ids": [BLOCKS[:5]]}, "5 blocks of 16 tokens for 83 tokens"),
        ({"remote_block_ids": [BLOCKS, BLOCKS]}, "remote_block_ids"),
        ({"kvpp": None}, "kvpp"),
        ({"remote_host": "h" * 600}, "remote_host"),
    ],
)
def test_what_is_wrong_with_an_offer_is_said(
    change: dict[str, Any], said: str, decode: DecodeScheduler
) -> None:
    """1.2: another version of this package, another connector's params, damage."""
    with listening() as lines:
        decode.arrived(request(TOKENS, GOOD | change))
    assert len(lines) == 1 and said in lines[0] and "computed here" in lines[0]
