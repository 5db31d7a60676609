"""Field report 8.1: dead nodes leave the rotation, and come back after they have recovered."""

from __future__ import annotations

import asyncio

import pytest

from tests.proxy.backend import gated, offer, reset, whole
from tests.proxy.world import World, looped, until, world


async def sees(w: World, leg: str, number: int, healthy: bool) -> None:
    """Wait until the proxy takes a node for healthy, or not."""
    node = (w.p if leg == "prefill" else w.d)[number]
    await w.comes_true("node_healthy", float(healthy), leg=leg, node=node.url)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@looped
async def test_a_dead_node_leaves_and_returns(leg: str) -> None:
    """While it is away all requests go to the other one, and none of them notices."""
    async with world(2, 2) as w:
        nodes = w.p if leg == "prefill" else w.d
        await nodes[0].stop()
        await sees(w, leg, 0, healthy=False)
        before = len(nodes[0].received)
        for _ in range(4):
            assert (await w.ask()).status == 200
        assert len(nodes[0].received) == before
        assert await w.metric("retries_total", leg=leg) == 0
        await nodes[0].start()
        await sees(w, leg, 0, healthy=True)
        for _ in range(2):
            assert (await w.ask()).status == 200
        assert len(nodes[0].received) == before + 1


@looped
async def test_a_node_that_says_that_it_is_ill_leaves_and_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM's /health answers 503 once its engine is dead, while the server still listens."""
    async with world() as w:
        w.d[0].health = 503
        await sees(w, "decode", 0, healthy=False)
        assert (await w.ask()).status == 503
        w.d[0].health = 200
        await sees(w, "decode", 0, healthy=True)
        assert (await w.ask()).status == 200
        url = w.d[0].url
    lines = [line for line in caplog.messages if line.startswith("decode node ")]
    assert lines == [
        f"decode node {url} is up",
        f"decode node {url} is down: /health answered 503",
        f"decode node {url} is up",
    ]


@looped
async def test_a_node_whose_health_does_not_answer_leaves_after_a_second_time() -> None:
    """A probe is bounded; and one slow answer of a busy server is not its death."""
    async with world(decodes=2, probe_timeout=0.5) as w:
        w.d[0].health_hangs = True
        await sees(w, "decode", 0, healthy=False)
        assert (await w.ask()).status == 200
        w.d[0].health_hangs = False
        await sees(w, "decode", 0, healthy=True)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@looped
async def test_without_a_node_the_answer_is_503_and_nobody_is_asked(leg: str) -> None:
    """In OpenAI's shape, with the leg; in particular no prefill is spent without a decode node."""
    async with world() as w:
        await (w.p if leg == "prefill" else w.d)[0].stop()
        await sees(w, leg, 0, healthy=False)
        got = await w.ask(stream=True)
        assert got.status == 503
        assert got.error["leg"] == leg
        assert got.error["message"] == f"no {leg} node is up"
        assert "Retry-After" in got.headers
        assert not w.p[0].received and not w.d[0].received
        assert await w.metric("requests_total", outcome="unavailable") == 1


@looped
async def test_a_refused_connection_takes_a_node_out_without_waiting_for_a_probe() -> None:
    """And it is probed at once, not after the interval, so it is back as soon as it can be."""
    async with world(decodes=2, probe_interval=600.0) as w:
        await w.d[0].stop()
        await w.ask()
        await w.ask()  # one of the two reaches the dead node
        assert await w.metric("node_healthy", leg="decode", node=w.d[0].url) == 0
        assert await w.metric("retries_total", leg="decode") == 1
        for _ in range(4):
            assert (await w.ask()).status == 200
        assert await w.metric("retries_total", leg="decode") == 1


@looped
async def test_a_failed_request_makes_the_node_be_probed_at_once() -> None:
    async with world(decodes=2, probe_interval=600.0) as w:
        w.d[0].health = w.d[1].health = 503  # not seen yet: the next probe is far away
        w.d[0].usual = reset
        assert (await w.ask()).status == 200
        await sees(w, "decode", 0, healthy=False)
        await sees(w, "decode", 1, healthy=True)


@looped
async def test_an_answered_5xx_leaves_the_verdict_to_the_probes() -> None:
    """One bad request must not take every node out of rotation."""
    async with world(retries=0) as w:
        w.d[0].script.append(whole(500, b""))
        assert (await w.ask()).status == 502
        assert (await w.ask()).status == 200


@looped
async def test_the_proxys_own_health_is_that_of_its_pools() -> None:
    async with world(decodes=2) as w:
        got = await w.get("/health")
        assert got.status == 200
        assert got.json["decode"] == {w.d[0].url: True, w.d[1].url: True}
        await w.d[0].stop()
        await sees(w, "decode", 0, healthy=False)
        assert (await w.get("/health")).status == 200
        await w.d[1].stop()
        await sees(w, "decode", 1, healthy=False)
        got = await w.get("/health")
        assert got.status == 503
        assert got.json["prefill"] == {w.p[0].url: True}
        assert set(got.json["decode"].values()) == {False}


@looped
async def test_models_come_from_a_node_that_answers() -> None:
    async with world(decodes=2, probe_interval=600.0) as w:
        await w.d[0].stop()
        assert (await w.get("/v1/models")).status == 200
        await w.d[1].stop()
        assert (await w.get("/v1/models")).status == 502
        assert (await w.get("/v1/models")).status == 503


@looped
async def test_requests_that_run_survive_a_probe_that_fails() -> None:
    """A node out of rotation gets no new work; what it has, it may end."""
    gate = asyncio.Event()
    async with world() as w:
        w.p[0].usual = gated(gate, offer())
        asking = w.asking()
        await until(lambda: w.p[0].received)
        w.p[0].health = 503
        await sees(w, "prefill", 0, healthy=False)
        gate.set()
        assert (await asking).status == 200
