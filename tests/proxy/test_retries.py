"""Field reports 8.2 and 8.3: transfer data is one-shot, and a request has two legs, not one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohappyeyeballs
import pytest

from tests.proxy.backend import Answer, broken_stream, empty, gated, hang, offer, reset, whole
from tests.proxy.world import looped, until, world

FAILING: dict[str, Answer] = {
    "500": whole(500, b"x"),
    "reset": reset,
    "hang": hang,
    "empty": empty,
    "no event": broken_stream(),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FAILING)
@looped
async def test_a_further_try_of_decode_has_a_prefill_of_its_own(name: str, stream: bool) -> None:
    """8.2: what decode may have read is never sent again, and is released. Even at one node."""
    bounds: dict[str, Any] = {}
    if name == "hang":
        bounds = {"decode_first_byte_timeout": 0.7, "decode_timeout": 0.7}
    async with world(retries=2, **bounds) as w:
        w.d[0].script.extend([FAILING[name]] * 2)
        assert (await w.ask(stream=stream)).status == 200
        offered = [params["remote_request_id"] for params in w.offered]
        assert len(offered) == len(set(offered)) == 3
        assert len(w.p[0].received) == 3
        await until(lambda: w.releases == w.offered[:2])
        assert await w.metric("releases_total", result="released") == 2


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@looped
async def test_the_node_that_failed_is_avoided_however_idle_it_is(leg: str) -> None:
    """A node that fails at once always has the least work, and would be chosen again and again."""
    gate = asyncio.Event()
    async with world(2, 2, retries=1) as w:
        broken, busy = w.p if leg == "prefill" else w.d
        for usual in (broken.usual, busy.usual):
            broken.script.append(gated(gate, usual))
            busy.script.append(gated(gate, usual))
        running = [w.asking(), w.asking()]
        await until(lambda: broken.received and busy.received)
        long = w.asking(prompt="x" * 50_000)
        await until(lambda: len(broken.received) + len(busy.received) == 3)
        if len(broken.received) == 2:
            broken, busy = busy, broken
        broken.script.clear()
        busy.script.clear()
        broken.usual = reset
        assert (await w.ask()).status == 200
        assert (len(broken.received), len(busy.received)) == (2, 3)
        gate.set()
        for got in await asyncio.gather(*running, long):
            assert got.status == 200


@looped
async def test_tries_have_ids_of_their_own() -> None:
    """8.2: the engine may still hold the first try when the second one comes."""
    async with world() as w:
        w.d[0].script.append(reset)
        got = await w.post("/v1/completions", {"prompt": "x"}, **{"X-Request-Id": "mine"})
        first, second = (received.request_id for received in w.d[0].received)
        assert [received.request_id for received in w.p[0].received] == [first, second]
        assert second == f"{first}.2"
        assert got.headers["X-Request-Id"] == first


@looped
async def test_the_number_of_tries_is_bounded() -> None:
    """Both legs together: a request that kills nodes must not see all of them."""
    async with world(prefills=5, decodes=5, retries=2) as w:
        for node in w.d:
            node.usual = reset
        w.p[0].script.append(reset)
        w.p[1].script.append(reset)
        got = await w.ask()
        assert got.status == 502
        assert "(try 3)" in got.error["message"]
        asked = [len(node.received) for node in w.p]
        assert sum(asked) == 3
        assert sum(len(node.received) for node in w.d) == 1
        assert await w.metric("retries_total", leg="prefill") == 2
        assert await w.metric("retries_total", leg="decode") == 0


@looped
async def test_without_retries_there_is_one_try() -> None:
    async with world(prefills=2, decodes=2, retries=0) as w:
        for node in w.d:
            node.usual = reset
        assert (await w.ask()).status == 502
        assert sum(len(node.received) for node in w.p) == 1


@looped
async def test_a_prefill_that_fails_gives_nothing_back_and_one_that_decode_refuses_does() -> None:
    """2.2 (b): decode rejects for length; prefill's blocks must not wait for their lease."""
    async with world() as w:
        w.d[0].script.append(whole(400, {"error": {"message": "too long"}}))
        assert (await w.ask()).status == 400
        await until(lambda: w.releases == w.offered)
        w.p[0].script.append(whole(400, {"error": {"message": "too long"}}))
        assert (await w.ask()).status == 400
        assert len(w.releases) == 1


@looped
async def test_decode_that_dies_while_prefill_runs_is_not_waited_for() -> None:
    """2.2 (a), (d): prefill has finished and decode was never used: an explicit release."""
    gate = asyncio.Event()
    params = {"do_remote_prefill": True, "remote_request_id": "unused"}
    async with world(probe_interval=30.0) as w:  # only the request itself probes
        w.p[0].script.append(gated(gate, offer(kv_transfer_params=params)))
        asking = w.asking()
        await until(lambda: w.p[0].received)
        await w.d[0].stop()
        gate.set()
        got = await asking
        assert got.status == 502
        assert (got.error["leg"], got.error["node"]) == ("decode", w.d[0].url)
        await until(lambda: w.releases == [params])
        assert len(w.p[0].received) == 1  # no further prefill without a decode node


@looped
async def test_a_decode_node_that_is_gone_is_replaced_by_one_that_is_not() -> None:
    gate = asyncio.Event()
    async with world(decodes=2, probe_interval=30.0) as w:
        w.p[0].script.append(gated(gate, offer()))
        asking = w.asking()
        await until(lambda: w.p[0].received)
        await w.d[0].stop()  # it would have been its turn
        gate.set()
        assert (await asking).status == 200
        assert len(w.d[1].received) == 1
        assert len(w.p[0].received) == 2


@looped
async def test_a_release_that_raises_or_does_not_end_harms_no_request() -> None:
    """Counted as failed and late; the client's answer does not wait for either."""
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def release(params: dict[str, object]) -> bool:
        if params["remote_request_id"] == "raises":
            raise KeyError("no such peer")
        if params["remote_request_id"] == "blocks":
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(30)
        return False

    async with world(release=release, release_timeout=0.2) as w:
        for name in ("raises", "blocks", "says no"):
            w.d[0].script.append(whole(400, b"{}"))
            params = {"do_remote_prefill": True, "remote_request_id": name}
            w.p[0].script.append(offer(kv_transfer_params=params))
            assert (await w.ask()).status == 400
        await w.comes_true("releases_total", 1.0, result="failed")
        await w.comes_true("releases_total", 1.0, result="late")
        await w.comes_true("releases_total", 1.0, result="not_released")
        gate.set()
        assert (await w.ask()).status == 200


@looped
async def test_a_connection_that_came_late_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proxy had no processor for longer than a connection may take: the node is well."""
    connect = aiohappyeyeballs.start_connection
    late = [True, False, True, False]  # to prefill, again, to decode, again

    async def start_connection(*args: Any, **kwargs: Any) -> Any:
        if asyncio.current_task() not in others and late.pop(0):
            time.sleep(0.5)  # nothing else runs in this process either
            await asyncio.sleep(0)
        return await connect(*args, **kwargs)

    async with world(retries=0, connect_timeout=0.2, probe_interval=60.0) as w:
        others = asyncio.all_tasks()
        monkeypatch.setattr(aiohappyeyeballs, "start_connection", start_connection)
        assert (await w.ask()).status == 200
        monkeypatch.undo()
    assert not late
