"""The proxy as a process and as a server: command line, limits, start, metrics, graceful stop."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from kvpp_connectors.cli.main import app
from tests.contract.processes import run_python
from tests.proxy.backend import DONE, Backend, chunk, hang, late, offer
from tests.proxy.world import BOUND_S, looped, until, world

# `kvpp proxy` without the other commands, which import torch.
RUN = "import typer; from kvpp_connectors.cli.proxy import proxy; typer.run(proxy)"
COMMAND = (sys.executable, "-c", RUN)
NODES = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"{", 400, "no JSON"),
        (b"", 400, "no JSON"),
        (b"\xff\xfe", 400, "no JSON"),
        (b"[1]", 400, "must be a JSON object, not list"),
        (b"[" * 100_000, 400, "no JSON"),
        (b'{"prompt": "' + b"x" * 5000 + b'"}', 413, "larger than 4096 bytes"),
    ],
)
@looped
async def test_a_body_that_is_none_is_refused_here(body: bytes, status: int, text: str) -> None:
    """In OpenAI's shape, and no node has heard of it."""
    async with world(max_body_bytes=4096 if status == 413 else 1 << 20) as w:
        got = await w.post("/v1/completions", body)
        assert got.status == got.error["code"] == status
        assert text in got.error["message"]
        assert w.p[0].received == []
        assert await w.metric("requests_total", outcome="invalid") == 1


@looped
async def test_the_limit_counts_what_a_compressed_body_becomes() -> None:
    async with world(max_body_bytes=4096) as w:
        body = gzip.compress(json.dumps({"prompt": "x" * 1_000_000}).encode())
        assert len(body) < 4096
        got = await w.post("/v1/completions", body, **{"Content-Encoding": "gzip"})
        assert got.status == 413
        small = gzip.compress(b'{"prompt": "x"}')
        got = await w.post("/v1/completions", small, **{"Content-Encoding": "gzip"})
        assert got.status == 200
        got = await w.post("/v1/completions", b"no gzip", **{"Content-Encoding": "gzip"})
        assert got.status == 400


@looped
async def test_unknown_paths_and_methods_are_errors_in_the_same_shape() -> None:
    async with world() as w:
        got = await w.post("/v1/embeddings", {})
        assert (got.status, got.error["code"]) == (404, 404)
        assert "POST /v1/embeddings" in got.error["message"]
        got = await w.get("/v1/completions")
        assert (got.status, got.error["code"]) == (405, 405)


@looped
async def test_metrics_have_requests_seconds_nodes_and_releases() -> None:
    async with world() as w:
        await w.ask()
        await w.ask(stream=True)
        for name in ("prefill_seconds", "first_byte_seconds", "request_seconds"):
            assert await w.metric(f"{name}_count") == 2
            assert 0 < await w.metric(f"{name}_sum") < BOUND_S
        labels = {"leg": "decode", "node": w.d[0].url}
        assert await w.metric("node_healthy", **labels) == 1
        assert await w.metric("node_requests", **labels) == 0
        page = await w.get("/metrics")
        assert page.headers["Content-Type"].startswith("text/plain")
        assert b'kvpp_proxy_requests_total{outcome="cut"} 0.0' in page.body  # there before it is


@looped
async def test_a_stop_cancels_what_does_not_end_and_gives_it_back() -> None:
    """After --shutdown-timeout: decode's call is cancelled, and the release is waited for."""
    started, may_end = threading.Event(), threading.Event()
    released = []

    def release(params: dict[str, Any]) -> bool:
        started.set()
        may_end.wait(BOUND_S)
        released.append(params)
        return True

    async with world(shutdown_timeout=0.1, release=release) as w:
        w.d[0].usual = hang
        asking = w.asking()
        await until(lambda: w.offered)
        stopping = asyncio.create_task(w.runner.cleanup())
        await until(started.is_set)
        assert (await asyncio.wait({stopping}, timeout=0.2))[0] == set()
        may_end.set()
        await stopping
        assert released == w.offered
        await until(lambda: w.d[0].received[0].cancelled)
        with pytest.raises(aiohttp.ClientError):
            await asking


@asynccontextmanager
async def command(p: Backend, d: Backend, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command itself, at a free port."""
    await p.start()
    await d.start()
    nodes = ("--prefill", p.url, "--decode", d.url)
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, *nodes, "--port", "0", *more), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await p.stop()
        await d.stop()


async def line_with(process: asyncio.subprocess.Process, text: str) -> str:
    """The next line of the log that has this text in it."""
    assert process.stderr is not None
    async with asyncio.timeout(BOUND_S):
        while line := (await process.stderr.readline()).decode():
            if text in line:
                return line.strip()
    raise AssertionError(f"the log has ended without {text!r}")


async def url_of(process: asyncio.subprocess.Process) -> str:
    """Where the command listens."""
    words = (await line_with(process, "listening on 127.0.0.1")).split()
    return f"http://127.0.0.1:{words[-1]}"


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@looped
async def test_a_signal_lets_running_requests_end_and_takes_no_new_ones(number: int) -> None:
    """The rest of the answer is made while the proxy already stops."""
    gate = asyncio.Event()
    p, d = Backend(offer()), Backend(late(gate, chunk("world") + DONE))
    async with command(p, d) as process, aiohttp.ClientSession() as client:
        url = await url_of(process)
        body = {"prompt": "x", "stream": True}
        async with client.post(f"{url}/v1/completions", json=body) as response:
            assert await response.content.readany() == chunk("hello")
            process.send_signal(number)
            await line_with(process, "stopping")
            await refuses(client, url)
            gate.set()
            assert await response.read() == chunk("world") + DONE
        assert "status 200, ok" in await line_with(process, "request ")
        assert await process.wait() == 0


async def refuses(client: aiohttp.ClientSession, url: str) -> None:
    """Wait until the port is closed."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                await client.get(f"{url}/health")
            except aiohttp.ClientConnectorError:
                return


@pytest.mark.process
@looped
async def test_a_stop_does_not_wait_for_ever() -> None:
    p, d = Backend(offer()), Backend(hang)
    async with command(p, d, "--shutdown-timeout", "0.1") as process:
        async with aiohttp.ClientSession() as client:
            url = await url_of(process)
            asking = asyncio.create_task(client.post(f"{url}/v1/completions", json={"prompt": "x"}))
            await until(lambda: d.received)
            process.terminate()
            assert await asyncio.wait_for(process.wait(), BOUND_S) == 0
            with pytest.raises(aiohttp.ClientError):
                await asking
        await until(lambda: d.received[0].cancelled)


@pytest.mark.process
@looped
async def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    async with world() as w:
        finished = await asyncio.create_subprocess_exec(
            *(*COMMAND, *NODES, "--port", str(w.port)), stderr=asyncio.subprocess.PIPE
        )
        _, text = await finished.communicate()
        assert finished.returncode == 1
        assert f"cannot listen on 127.0.0.1:{w.port}: " in text.decode()
        assert "Traceback" not in text.decode()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--prefill", "10.0.0.1:8100", *NODES[2:]), "10.0.0.1:8100"),
        (("--prefill", "ftp://a", *NODES[2:]), "no http URL"),
        (("--prefill", "http://u:secret@a", *NODES[2:]), "must not carry a user"),
        ((*NODES, "--decode", "http://127.0.0.1:2/"), "names a node twice"),
        ((*NODES, "--prefill-timeout", "0"), "--prefill-timeout must be positive and finite"),
        ((*NODES, "--decode-timeout", "inf"), "--decode-timeout must be positive and finite"),
        ((*NODES, "--probe-interval", "nan"), "--probe-interval must be positive and finite"),
        (NODES[:2], "--decode"),
        (NODES[2:], "--prefill"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    options: tuple[str, ...], text: str
) -> None:
    result = CliRunner().invoke(app, ["proxy", *options], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert text in result.output
    assert "secret" not in result.output


@pytest.mark.process
def test_the_proxy_needs_neither_vllm_nor_torch(tmp_path: Path) -> None:
    """It starts at once, and on hosts without an accelerator."""
    code = """
        import json, sys
        import kvpp_connectors.proxy.app
        print(json.dumps([name for name in ("vllm", "torch") if name in sys.modules]))
    """
    assert run_python(code, tmp_path) == []
