"""The demo's deployment: a pool, prefill with KVPP, decode, and the proxy in front of both."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import aiohttp

from kvpp_connectors.connector.ports import reserved_ports
from kvpp_connectors.demo.children import Server
from kvpp_connectors.demo.settings import DemoSettings
from kvpp_connectors.mooncake_admin.servers import (
    STORE_ENVIRONMENT,
    MasterAddress,
    master_command,
    store_command,
)

__all__ = ["Fleet", "fleet", "is_healthy", "wait_healthy"]

_HOST = "127.0.0.1"
_START_S = 600.0  # for an engine to load on a busy machine
_PROBE_S = 0.25
_API_SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]


class Fleet:
    """The running servers and their URLs."""

    def __init__(self, settings: DemoSettings, stack: ExitStack) -> None:
        ports = stack.enter_context(reserved_ports(6, _HOST))
        rpc, http, store, prefill, decode, proxy = ports
        master = MasterAddress(_HOST, rpc, http)
        self.prefill, self.decode, self.proxy = map(_url, (prefill, decode, proxy))
        self._commands = {
            "master": master_command(master),
            "store": store_command(master, _HOST, store, settings.pool_mib << 20),
            "prefill": _prefill(settings, prefill, master),
            "decode": _decode(settings, decode),
            "proxy": _proxy(proxy, prefill, decode),
        }
        self._settings, self._stack = settings, stack
        self.servers = {name: self._start(name) for name in self._commands}

    async def wait_healthy(self, *names: str) -> None:
        """Wait until these servers answer: prefill, decode, proxy.

        Raises:
            ChildFailed: one ended, or did not become healthy.
        """
        with self._settings.console.status(f"{', '.join(names)}: starting"):
            for name in names:
                await wait_healthy(self.servers[name], getattr(self, name))

    async def restart(self, name: str, *, kill: bool = False) -> None:
        """Stop an engine and start it again, at the same address, with nothing in its caches.

        Raises:
            ChildFailed: it did not come back.
        """
        server = self.servers[name]
        await asyncio.to_thread(server.kill if kill else server.stop)
        self.servers[name] = self._start(name)
        await self.wait_healthy(name, "proxy")  # which takes it back with its next probe

    def check(self) -> None:
        """Raise `ChildFailed` if a server has ended by itself."""
        for server in self.servers.values():
            server.check()

    def _start(self, name: str) -> Server:
        return self._stack.enter_context(
            Server(
                self._commands[name],
                title=name,
                log=self._settings.folder / f"{name}.log",
                environment={**self._settings.environment, **STORE_ENVIRONMENT},
            )
        )


@contextmanager
def fleet(settings: DemoSettings) -> Iterator[Fleet]:
    """Start everything; stop everything at the end.

    Raises:
        ChildFailed: a server ended or did not become healthy.
    """
    with ExitStack() as stack:
        servers = Fleet(settings, stack)
        asyncio.run(servers.wait_healthy("prefill", "decode", "proxy"))
        yield servers


async def wait_healthy(server: Server, url: str) -> None:
    """Wait until ``url``/health answers 200.

    Raises:
        ChildFailed: the server ended first, or the time is over.
    """
    try:
        async with asyncio.timeout(_START_S):
            while not await is_healthy(url):
                server.check()
                await asyncio.sleep(_PROBE_S)
    except TimeoutError as error:
        raise server.failure(f"{url}/health did not answer 200 within {_START_S:.0f} s") from error


async def is_healthy(url: str) -> bool:
    """Whether ``url``/health answers 200 within 5 s."""
    timeout = aiohttp.ClientTimeout(total=5)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/health") as answer,
        ):
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _proxy(port: int, prefill: int, decode: int) -> list[str]:
    return [
        *(sys.executable, "-m", "kvpp_connectors.cli", "proxy", f"--port={port}"),
        *(f"--prefill={_url(prefill)}", f"--decode={_url(decode)}", "--probe-interval=1"),
    ]


def _prefill(settings: DemoSettings, port: int, master: MasterAddress) -> list[str]:
    pool = {
        "mooncake": {
            "master_server_address": str(master),
            "global_segment_size": 0,  # what a worker lent would go with it
        },
        "use_layerwise": settings.layerwise,
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
    memory = f"--kv-cache-memory-bytes={settings.memory}"
    return [*_engine(settings, port, {"enable_kvpp": True}, transfer), ranks, memory]


def _decode(settings: DemoSettings, port: int) -> list[str]:
    transfer = {
        "kv_connector": "MooncakeConnectorV2",
        "kv_role": "kv_consumer",
        "kv_port": 0,
        "kv_load_failure_policy": settings.decode_load_failures,
    }
    return [
        *_engine(settings, port, {}, transfer),
        f"--kv-cache-memory-bytes={settings.decode_memory or settings.memory}",
    ]


def _engine(
    settings: DemoSettings,
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
        "max-num-batched-tokens": str(settings.max_num_batched_tokens),
        "max-model-len": str(settings.max_model_len),
        "additional-config": json.dumps(additional_config),
        "kv-transfer-config": json.dumps(transfer),
    }
    flags = ["--enforce-eager", "--skip-tokenizer-init"]
    return [*_API_SERVER, *(f"--{name}={value}" for name, value in arguments.items()), *flags]


def _url(port: int) -> str:
    return f"http://{_HOST}:{port}"
