"""The demo's servers: prefill with KVPP on several ranks, decode on one, a proxy in front."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from kvpp_connectors.demo.children import Server

__all__ = ["Fleet", "FleetSettings", "fleet", "wait_healthy"]

_HOST = "127.0.0.1"
_START_S = 600.0  # for an engine to load on a busy machine
_PROBE_S = 0.25
_API_SERVER = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What the servers run with. Memory in bytes per rank, lengths in tokens."""

    model: Path
    tensor_parallel_size: int
    kv_cache_memory_bytes: int
    max_num_batched_tokens: int
    max_model_len: int
    logs: Path
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The running servers' URLs."""

    prefill: str
    decode: str
    proxy: str


@contextmanager
def fleet(settings: FleetSettings, console: Console) -> Iterator[Fleet]:
    """Start prefill, decode and the proxy; stop all of them at the end.

    Raises:
        ChildFailed: a server ended or did not become healthy.
    """
    prefill, decode, proxy = _free_ports(3)
    servers = {
        "prefill": (
            prefill,
            _API_SERVER,
            _engine(
                settings,
                prefill,
                {"enable_kvpp": True},
                "kv_producer",
                f"--tensor-parallel-size={settings.tensor_parallel_size}",
            ),
        ),
        "decode": (decode, _API_SERVER, _engine(settings, decode, {}, "kv_consumer")),
        "proxy": (
            proxy,
            "kvpp_connectors.cli",
            [
                "proxy",
                f"--port={proxy}",
                f"--prefill={_url(prefill)}",
                f"--decode={_url(decode)}",
            ],
        ),
    }
    with ExitStack() as stack:
        running = {
            name: (
                stack.enter_context(
                    Server(
                        module,
                        arguments,
                        title=f"{name} server",
                        log=settings.logs / f"{name}.log",
                        environment=settings.environment,
                    )
                ),
                _url(port),
            )
            for name, (port, module, arguments) in servers.items()
        }
        with console.status("prefill, decode and proxy: starting"):
            for server, url in running.values():
                asyncio.run(wait_healthy(server, url))
        yield Fleet(*(url for _, url in running.values()))


async def wait_healthy(server: Server, url: str) -> None:
    """Wait until ``url``/health answers 200.

    Raises:
        ChildFailed: the server ended first, or the time is over.
    """
    timeout = aiohttp.ClientTimeout(total=5)
    try:
        async with asyncio.timeout(_START_S), aiohttp.ClientSession(timeout=timeout) as session:
            while not await _is_healthy(session, url):
                server.check()
                await asyncio.sleep(_PROBE_S)
    except TimeoutError as error:
        raise server.failure(f"{url}/health did not answer 200 within {_START_S:.0f} s") from error


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _engine(
    settings: FleetSettings,
    port: int,
    additional_config: Mapping[str, Any],
    role: str,
    *options: str,
) -> list[str]:
    transfer = {"kv_connector": "MooncakeConnectorV2", "kv_role": role, "kv_port": 0}
    arguments = {
        "model": str(settings.model),
        "served-model-name": "demo",
        "host": _HOST,
        "port": str(port),
        "dtype": "float32",
        "attention-backend": "CPU_MLA",
        "kv-cache-memory-bytes": str(settings.kv_cache_memory_bytes),
        "max-num-batched-tokens": str(settings.max_num_batched_tokens),
        "max-model-len": str(settings.max_model_len),
        "additional-config": json.dumps(additional_config),
        "kv-transfer-config": json.dumps(transfer),
    }
    flags = ["--enforce-eager", "--skip-tokenizer-init"]
    return [*(f"--{name}={value}" for name, value in arguments.items()), *flags, *options]


def _url(port: int) -> str:
    return f"http://{_HOST}:{port}"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((_HOST, 0))
        return [probe.getsockname()[1] for probe in probes]
