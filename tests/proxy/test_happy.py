"""What a healthy request looks like from all three sides."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.proxy.backend import answers, chunk, events, gated, offer, whole
from tests.proxy.world import Got, World, looped, until, world

ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'


@looped
async def test_the_two_legs_get_the_bodies_of_the_protocol() -> None:
    """Prefill: one token and the wish; decode: the client's body and what prefill gave."""
    async with world() as w:
        body = {
            "model": "m",
            "prompt": "hi",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 7,
            "max_completion_tokens": 7,
            "min_tokens": 3,
            "unknown": {"kept": [1, 2.5, None, 12345678901234567890]},
        }
        got = await w.post("/v1/completions", body)
        assert got.status == 200
        (prefill,), (decode,) = w.p[0].received, w.d[0].received
    assert prefill.body == {
        "model": "m",
        "prompt": "hi",
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "unknown": body["unknown"],
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    assert decode.params["do_remote_prefill"] is True
    assert {k: v for k, v in decode.body.items() if k != "kv_transfer_params"} == body
    assert prefill.request_id == decode.request_id
    assert prefill.path == decode.path == "/v1/completions"


@looped
async def test_max_completion_tokens_is_not_invented() -> None:
    async with world() as w:
        await w.ask()
        assert "max_completion_tokens" not in w.p[0].received[0].body


@looped
async def test_transfer_data_is_passed_on_verbatim() -> None:
    """Every field, known or not, nested, null, large and odd: the connector's own business."""
    params = {
        "do_remote_prefill": True,
        "kvpp": {"owners": [[0, 3], [4, 7]], "epoch": 2**63, "é": "\ud83d"},
        "remote_blocks_expiry_time": 1790000000.1234567,
        "last_token_id": None,
        "remote_block_ids": [[], [1]],
    }
    async with world() as w:
        w.p[0].usual = offer(kv_transfer_params=params)
        assert (await w.ask()).status == 200
        assert w.offered == [params]
        assert json.dumps(w.offered[0]) == json.dumps(params)  # the order, too


@looped
async def test_a_stream_arrives_as_decode_sent_it() -> None:
    async with world() as w:
        got = await w.ask(stream=True)
    assert got.body == chunk("hello") + chunk("world") + b"data: [DONE]\n\n"
    assert got.headers["Content-Type"].startswith("text/event-stream")


@looped
async def test_chunks_are_forwarded_while_decode_still_generates() -> None:
    """Not collected: the client has the first before decode is allowed to make the second."""
    gate = asyncio.Event()

    async def wait(_: Any) -> None:
        await gate.wait()

    async with world() as w:
        w.d[0].usual = events(chunk("one"), then=wait)
        body = json.dumps({"prompt": "hi", "stream": True}).encode()
        async with w.client.post(f"{w.url}/v1/completions", data=body) as response:
            assert await response.content.readany() == chunk("one")
            gate.set()
            await response.read()


@looped
async def test_the_header_waits_for_the_first_chunk() -> None:
    """Field report 8.1: a 200 that is sent early cannot be taken back. A role is no answer yet."""
    gate = asyncio.Event()

    async def wait(_: Any) -> None:
        await gate.wait()

    async with world(retries=0) as w:
        w.d[0].usual = events(b": keep-alive\n\n", ROLE, then=wait)
        asking = w.asking(stream=True)
        await until(lambda: w.d[0].received)
        assert not asking.done()
        gate.set()  # the stream ends without an answer
        assert (await asking).status == 502


@looped
async def test_an_answer_that_is_not_streamed_is_forwarded() -> None:
    async with world() as w:
        got = await w.ask("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
        assert w.d[0].received[0].path == "/v1/chat/completions"
    assert got.status == 200
    assert got.json["choices"][0]["text"] == "hello world"
    assert got.headers["Content-Type"].startswith("application/json")


@looped
async def test_nothing_is_released_after_a_request_that_went_well() -> None:
    async with world() as w:
        await w.ask()
        await w.ask(stream=True)
        releases = w.releases
    assert releases == []  # the proxy has ended, and with it all its background work


@looped
async def test_prefill_that_offers_nothing_lets_decode_recompute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Logged with the request's id and counted; decode gets no transfer to pull."""
    async with world() as w:
        for params in (None, {}, "text", {"do_remote_prefill": False}):
            w.p[0].script.append(offer(kv_transfer_params=params))
            got = await w.ask()
            assert got.status == 200
            request_id = got.headers["X-Request-Id"]
            (line,) = [r for r in caplog.messages if request_id in r and "no transfer" in r]
            assert "not_offered" in line
        assert w.offered == ["absent"] * 4
        assert await w.metric("recomputes_total", reason="not_offered") == 4


@looped
async def test_decode_does_not_use_what_an_aborted_prefill_offers() -> None:
    """Field report 8.3: prefill did not finish, so its cache is incomplete. It is released."""
    async with world() as w:
        choice = {"text": "", "finish_reason": "abort"}
        params = {"do_remote_prefill": True, "remote_request_id": "aborted"}
        w.p[0].usual = offer(choices=[choice], kv_transfer_params=params)
        assert (await w.ask()).status == 200
        assert w.offered == ["absent"]
        await until(lambda: w.releases == [params])
        assert await w.metric("recomputes_total", reason="aborted") == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"n": 2}, "several_sequences"),
        ({"use_beam_search": True}, "several_sequences"),
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"prompt": [[1, 2], [3]]}, "several_prompts"),
        ({"prompt": "a", "prompt_embeds": "b"}, "several_prompts"),
        ({"prompt_logprobs": 0}, "prompt_scores"),
        ({"echo": True, "logprobs": 1}, "prompt_scores"),
        ({"echo": True, "top_logprobs": 1}, "prompt_scores"),
    ],
)
@looped
async def test_what_one_transfer_cannot_serve_goes_to_decode_alone(
    body: dict[str, Any], reason: str
) -> None:
    """Field report 8.2: transfer data is one-shot, so two sequences must not share it."""
    async with world() as w:
        assert (await w.ask(**body)).status == 200
        assert w.p[0].received == []
        assert w.offered == ["absent"]
        assert await w.metric("recomputes_total", reason=reason) == 1


@pytest.mark.parametrize(
    "body", [{"n": 1}, {"n": None}, {"prompt": [1, 2]}, {"prompt": ["a"]}, {"echo": True}]
)
@looped
async def test_one_sequence_of_one_prompt_is_transferred(body: dict[str, Any]) -> None:
    async with world() as w:
        assert (await w.ask(**body)).status == 200
        assert len(w.p[0].received) == 1
        assert w.offered[0]["do_remote_prefill"] is True


@looped
async def test_a_clients_own_transfer_data_is_dropped() -> None:
    """It would make an engine connect to an address of the client's choice."""
    async with world() as w:
        w.p[0].script.append(offer(kv_transfer_params=None))
        forged = {"do_remote_prefill": True, "remote_host": "10.0.0.9"}
        await w.ask(kv_transfer_params=forged)
        await w.ask(kv_transfer_params=forged, n=2)
        assert w.offered == ["absent", "absent"]
        assert w.p[0].received[0].params["remote_host"] is None


@looped
async def test_headers_that_back_ends_need_are_passed_and_no_others() -> None:
    async with world() as w:
        passed = {"Authorization": "Bearer k", "traceparent": "00-1-2-01"}
        await w.post("/v1/completions", {"prompt": "x"}, Cookie="a=b", **passed)
        for received in (*w.p[0].received, *w.d[0].received):
            assert received.headers.items() >= passed.items()
            assert "Cookie" not in received.headers


async def _two_at_once(w: World, **headers: str) -> set[str]:
    """Send two requests that live at the same time; the ids that prefill saw."""
    gate = asyncio.Event()
    w.p[0].usual = gated(gate, offer())
    posts = [w.post("/v1/completions", {"prompt": "x"}, **headers) for _ in range(2)]
    both = asyncio.gather(*posts)
    await until(lambda: len(w.p[0].received) == 2)
    gate.set()
    assert [got.status for got in await both] == [200, 200]
    return {received.request_id for received in w.p[0].received}


@looped
async def test_two_live_requests_with_one_id_do_not_collide() -> None:
    """Field report 8.2: the id of the client's choice is kept, and made unique."""
    async with world() as w:
        ids = await _two_at_once(w, **{"X-Request-Id": "mine"})
        assert len(ids) == 2
        assert all(one.startswith("mine-") for one in ids)
        assert {r.request_id for r in w.d[0].received} == ids


@looped
async def test_requests_without_an_id_get_one() -> None:
    async with world() as w:
        assert len(await _two_at_once(w)) == 2


@looped
async def test_an_id_in_the_body_counts_too_and_does_not_reach_the_engines() -> None:
    async with world() as w:
        got = await w.ask(request_id="mine")
        (received,) = w.p[0].received
        assert received.request_id.startswith("mine-")
        assert got.headers["X-Request-Id"] == received.request_id
        assert "request_id" not in {**received.body, **w.d[0].received[0].body}


@looped
async def test_odd_characters_and_lengths_in_ids_are_harmless() -> None:
    """Field report 8.2: ids with odd characters, and one that is a prefix of another."""
    async with world() as w:
        for odd in ("é", "a b/c?d=%0a\tz", "x" * 5000, "'\"{}\\", " "):
            got = await w.post("/v1/completions", {"prompt": "x"}, **{"X-Request-Id": odd})
            assert got.status == 200
        ids = [received.request_id for received in w.p[0].received]
        assert len(set(ids)) == 5
        assert all(one.isascii() and len(one) < 200 and " " not in one for one in ids)


@looped
async def test_work_goes_to_the_node_with_the_least_of_it() -> None:
    """A long prompt outweighs several short ones."""
    gate = asyncio.Event()
    async with world(prefills=2, decodes=2) as w:
        for node in w.p:
            node.usual = gated(gate, offer())
        long = w.asking(prompt="x" * 50_000)
        await until(lambda: w.p[0].received or w.p[1].received)
        other = w.p[0] if w.p[1].received else w.p[1]
        short: list[asyncio.Task[Got]] = []
        while len(short) < 4:
            short.append(w.asking())
            await until(lambda: len(other.received) == len(short))
        gate.set()
        await asyncio.gather(long, *short)
        assert sorted(len(node.received) for node in w.p) == [1, 4]


@looped
async def test_idle_nodes_take_turns() -> None:
    async with world(prefills=2, decodes=3) as w:
        for _ in range(6):
            await w.ask()
        assert [len(node.received) for node in (*w.p, *w.d)] == [3, 3, 2, 2, 2]


@looped
async def test_models_are_those_of_decode() -> None:
    async with world(decodes=2) as w:
        got = await w.get("/v1/models", Authorization="Bearer k")
        assert got.status == 200
        assert got.json == {"data": [{"id": "m"}], "authorization": "Bearer k"}


@looped
async def test_two_hundred_streams_at_once() -> None:
    """Field report 8.1, at high concurrency: no limit on connections that starves some."""
    async with world(prefills=2, decodes=2) as w:
        gate = asyncio.Event()
        for node in w.d:
            node.usual = gated(gate, answers)
        tasks = [w.asking(stream=True) for _ in range(200)]
        await until(lambda: sum(len(node.received) for node in w.d) == 200)
        gate.set()
        for got in await asyncio.gather(*tasks):
            assert got.status == 200 and got.events[-1] == "[DONE]"
        offered = [params["remote_request_id"] for params in w.offered]
        assert len(set(offered)) == 200
        assert await w.metric("requests_total", outcome="ok") == 200


@looped
async def test_one_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    """Id, both nodes, the seconds of prefill and to the first byte, status, outcome."""
    async with world() as w:
        got = await w.ask()
        urls = w.p[0].url, w.d[0].url
    (line,) = [line for line in caplog.messages if line.startswith("request ")]
    assert line.startswith(f"request {got.headers['X-Request-Id']}: prefill {urls[0]} ")
    assert f"decode {urls[1]}, first byte " in line
    assert line.endswith("tries 1, status 200, ok")


@looped
async def test_whatever_decode_calls_its_answer_is_kept() -> None:
    async with world() as w:
        w.d[0].usual = whole(200, b"<xml/>", **{"Content-Type": "text/xml"})
        got = await w.ask(stream=True)
        assert (got.body, got.headers["Content-Type"]) == (b"<xml/>", "text/xml")
