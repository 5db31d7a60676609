"""The demo's deployment: a pool, prefill with KVPP, decode, and the proxy in front of both."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvpp_connectors.demo.children import Server
from kvpp_connectors.demo.settings import Settings
from kvpp_connectors.host import free_ports
from kvpp_connectors.pool.mooncake_servers import (
    STORE_ENVIRONMENT,
    MasterAddress,
    master_command,
    store_command,
)

__all__ = ["Fleet", "fleet", "wait_healthy"]

_HOST = "127.0.0.1"
_START_S = 600.0  # for an engine to load on a busy machine
_PROBE_S = 0.25
_API_SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
_STORE_BYTES = 512 << 20  # memory of the pool, in a process that outlives the engines


@dataclass(slots=True)
class Fleet:
    """The running servers' URLs."""

    prefill: str
    decode: str
    proxy: str
    _restart: Callable[[], None]

    def restart_prefill(self) -> None:
        """Stop prefill and start it again, at the same address, with nothing in its caches.

        Raises:
            ChildFailed: it did not come back.
        """
        self._restart()


@contextmanager
def fleet(settings: Settings) -> Iterator[Fleet]:
    """Start everything; stop everything at the end.

    Raises:
        ChildFailed: a server ended or did not become healthy.
    """
    ports = free_ports(6)
    rpc, http, store, prefill, decode, proxy = ports
    master = MasterAddress(_HOST, rpc, http)
    with ExitStack() as stack:

        def start(name: str, command: list[str]) -> Server:
            return stack.enter_context(
                Server(
                    command,
                    title=name,
                    log=settings.folder / f"{name}.log",
                    environment={**settings.environment, **STORE_ENVIRONMENT},
                )
            )

        def await_all(servers: Mapping[int, Server], what: str) -> None:
            with settings.console.status(f"{what}: starting"):
                for port, server in servers.items():
                    asyncio.run(wait_healthy(server, _url(port)))

        start("master", master_command(master))
        start("store", store_command(master, _HOST, store, _STORE_BYTES))
        engine = _prefill(settings, prefill, master)
        running = {
            prefill: start("prefill", engine),
            decode: start("decode", _decode(settings, decode)),
            proxy: start("proxy", _proxy(proxy, prefill, decode)),
        }
        await_all(running, "prefill, decode and proxy")

        def restart() -> None:
            running[prefill].stop()
            running[prefill] = start("prefill", engine)
            # The proxy takes prefill back with its next probe.
            await_all({prefill: running[prefill], proxy: running[proxy]}, "prefill, again")

        yield Fleet(_url(prefill), _url(decode), _url(proxy), restart)


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


def _proxy(port: int, prefill: int, decode: int) -> list[str]:
    return [
        *(sys.executable, "-m", "kvpp_connectors.cli", "proxy", f"--port={port}"),
        *(f"--prefill={_url(prefill)}", f"--decode={_url(decode)}", "--probe-interval=1"),
    ]


def _prefill(settings: Settings, port: int, master: MasterAddress) -> list[str]:
    pool = {
        "mooncake": {
            "master_server_address": str(master),
            "global_segment_size": 0,  # what a worker lent would go with it
        },
        "lookup_deadline_s": 10.0,  # a small machine is busy with other things
    }
    children = [
        {
            "kv_connector": "MooncakeConnectorV2",
            "kv_role": "kv_producer",
            "kv_port": 0,
            # An offer is lost where a client leaves while it is on its way to the proxy.
            "kv_connector_extra_config": {"lease_seconds": 20},
        },
        {
            "kv_connector": "AscendStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": pool,
        },
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    ranks = f"--tensor-parallel-size={settings.tensor_parallel_size}"
    return [*_engine(settings, port, {"enable_kvpp": True}, transfer), ranks]


def _decode(settings: Settings, port: int) -> list[str]:
    transfer = {
        "kv_connector": "MooncakeConnectorV2",
        "kv_role": "kv_consumer",
        "kv_port": 0,
        "kv_load_failure_policy": "fail",  # nothing is computed in secret
    }
    return _engine(settings, port, {}, transfer)


def _engine(
    settings: Settings,
    port: int,
    additional_config: Mapping[str, Any],
    transfer: Mapping[str, Any],
) -> list[str]:
    arguments = {
        "model": str(settings.model),
        "served-model-name": "demo",
        "host": _HOST,
        "port": str(port),
        "dtype": "float32",
        "attention-backend": "CPU_MLA",
        "kv-cache-memory-bytes": str(settings.memory),
        "max-num-batched-tokens": str(settings.max_num_batched_tokens),
        "max-model-len": str(settings.max_model_len),
        "additional-config": json.dumps(additional_config),
        "kv-transfer-config": json.dumps(transfer),
    }
    flags = ["--enforce-eager", "--skip-tokenizer-init"]
    return [*_API_SERVER, *(f"--{name}={value}" for name, value in arguments.items()), *flags]


def _url(port: int) -> str:
    return f"http://{_HOST}:{port}"
