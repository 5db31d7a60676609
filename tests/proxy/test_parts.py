"""The parts that need no network: events, ids, nodes, options."""

from __future__ import annotations

import json
import random

import pytest

from kvpp_connectors.proxy.call import read_call
from kvpp_connectors.proxy.errors import NoNode
from kvpp_connectors.proxy.node import Leg, Node
from kvpp_connectors.proxy.node_pool import NodePool
from kvpp_connectors.proxy.options import ProxyOptions
from kvpp_connectors.proxy.sse import (
    EventBuffer,
    begins_answer,
    error_event,
    is_done,
    split_at_error,
)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("seed", range(20))
def test_however_a_stream_is_cut_only_whole_events_come_out(end: bytes, seed: int) -> None:
    """And all of them, in order, with nothing but an unfinished last one held back."""
    numbers = random.Random(seed)
    whole = [b"data: " + bytes([97 + n]) * numbers.randint(0, 9) + end for n in range(12)]
    stream = b"".join(whole) + b"data: unfinished"
    buffer, position, out = EventBuffer(), 0, []
    while position < len(stream):
        size = numbers.randint(1, 12)
        out.append(buffer.feed(stream[position : position + size]))
        position += size
    assert all(part == b"" or part.endswith(end) for part in out)
    assert b"".join(out) == b"".join(whole)


@pytest.mark.parametrize(
    ("data", "begins"),
    [
        ("[DONE]", False),
        ('{"choices": []}', False),
        ('{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', False),
        ('{"choices": [{"delta": {"role": "assistant"}, "finish_reason": null}]}', False),
        ('{"choices": [{"delta": {"content": "a"}}]}', True),
        ('{"choices": [{"delta": {"reasoning": "a"}}]}', True),
        ('{"choices": [{"delta": {"tool_calls": [{"id": 1}]}}]}', True),
        ('{"choices": [{"delta": {}, "finish_reason": "stop"}]}', True),
        ('{"choices": [{"text": ""}]}', True),
        ("no json", False),
        ('{"choices": null}', False),
    ],
)
def test_what_begins_an_answer(data: str, begins: bool) -> None:
    assert begins_answer(f"data: {data}\n\n".encode()) is begins


def test_the_word_error_in_an_answer_is_no_error() -> None:
    """As a token, as a key further down, or in the text."""
    for choice in ({"text": "error"}, {"logprobs": {"error": 1}}, {"text": 'data: {"error": 1}'}):
        event = b"data: " + json.dumps({"choices": [choice], "error": None}).encode() + b"\n\n"
        assert split_at_error(event) == (event, None)


def test_an_error_event_is_found_between_others() -> None:
    before, after = b'data: {"a": 1}\n\n: comment\n\n', b"data: [DONE]\n\n"
    assert split_at_error(before + error_event({"code": 5}) + after) == (before, {"code": 5})
    assert split_at_error(b'data: {"error": "text"}\n\n') == (b"", {"message": "text"})


def test_the_mark_of_the_end_counts_as_an_event_only() -> None:
    assert is_done(b"data: x\n\ndata: [DONE]\n\n: bye\n\n")
    assert is_done(b"data:[DONE]\r\n\r\n")
    assert not is_done(b'data: {"text": "data: [DONE]"}\n\n')


def test_ids_are_unique_and_keep_what_the_client_chose() -> None:
    def id_of(chosen: str | None) -> str:
        headers = {} if chosen is None else {"X-Request-Id": chosen}
        return read_call("/", headers, b"{}").request_id

    assert id_of("a") != id_of("a")
    assert id_of("a").startswith("a-") and id_of("a b").startswith("a_b-")
    assert id_of(None) != id_of("")
    assert read_call("/", {}, b'{"request_id": 7}').request_id.isalnum()


def test_a_node_leaves_after_two_slow_probes_in_a_row_or_one_refusal() -> None:
    """A busy server is slow at times; a successful probe in between starts the count anew."""
    node = Node(Leg.DECODE, "http://a")
    node.mark_up()
    for _ in range(3):
        node.mark_slow("slow")
        assert node.healthy
        node.mark_up()
    node.mark_slow("slow")
    node.mark_slow("slow")
    assert not node.healthy
    node.mark_up()
    node.mark_down("refused")
    assert not node.healthy


def test_a_node_that_failed_a_request_is_its_last_choice_only() -> None:
    """With others it is avoided, however much they have to do; alone it is tried again."""
    pool = NodePool(Leg.DECODE, ["http://a", "http://b"])
    a, b = pool.nodes
    a.mark_up()
    b.mark_up()
    b.work = 1 << 30
    with pool.assigned(1, {a}) as chosen:
        assert chosen is b
    b.mark_down("gone")
    with pool.assigned(5, {a}) as chosen:
        assert chosen is a
        assert (a.work, a.requests) == (5, 1)
    assert (a.work, a.requests) == (0, 0)
    a.mark_down("gone")
    with pytest.raises(NoNode, match="no decode node is up"), pool.assigned(1, ()):
        pass


def test_options_are_checked_and_urls_cleaned() -> None:
    options = ProxyOptions(prefill=("http://a:1/",), decode=("https://b/prefix/",))
    assert (options.prefill, options.decode) == (("http://a:1",), ("https://b/prefix",))
    with pytest.raises(ValueError, match="at least one --decode URL"):
        ProxyOptions(prefill=("http://a",), decode=())
    with pytest.raises(ValueError, match="--retries"):
        ProxyOptions(prefill=("http://a",), decode=("http://b",), retries=-1)
    with pytest.raises(ValueError, match="limit of a body"):
        ProxyOptions(prefill=("http://a",), decode=("http://b",), max_body_bytes=0)
