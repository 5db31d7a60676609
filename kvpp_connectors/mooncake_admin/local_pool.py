"""A Mooncake pool on this host, in the foreground: a master and a store that end together."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvpp_connectors.connector.ports import reserved_ports
from kvpp_connectors.mooncake_admin.master_http import MasterHttp
from kvpp_connectors.mooncake_admin.servers import (
    STORE_ENVIRONMENT,
    MasterAddress,
    master_command,
    store_command,
)
from kvpp_connectors.pool.store.base import PoolUnavailable

__all__ = ["LocalPool", "answers", "serve"]

_START_S = 30.0
_PROBE_S = 0.05
_END_S = 10.0  # after SIGTERM; a master takes 1 s
_STDERR = 2  # what the processes print goes there


@dataclass(frozen=True, slots=True)
class LocalPool:
    """What to start."""

    master: MasterAddress
    memory: int  # bytes that a store lends, apart from what engines lend; 0: no store
    master_options: tuple[str, ...] = ()

    def transfer_config(self) -> dict[str, Any]:
        """The ``kv_transfer_config`` with which an engine joins it."""
        mooncake: dict[str, Any] = {
            "master_server_address": str(self.master),
            "protocol": "tcp",
        }
        if self.memory:
            mooncake["global_segment_size"] = 0  # what a worker lent would go with it
        return {
            "kv_connector": "AscendStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"mooncake": mooncake},
        }


async def serve(pool: LocalPool, announce: Callable[[], object]) -> None:
    """Start it, ``announce`` it once engines can use it, stop it at SIGINT, SIGTERM or SIGHUP.

    Raises:
        PoolUnavailable: an address cannot be listened on, or a process ended or did not start.
        KvppError: Mooncake is not installed.
    """
    _check_free(pool.master.host, pool.master.port, "--port")
    _check_free(pool.master.host, pool.master.http_port, "--http-port")
    commands = {"mooncake_master": master_command(pool.master, pool.master_options)}
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        if pool.memory:
            (port,) = stack.enter_context(reserved_ports(1, pool.master.host))
            command = store_command(pool.master, pool.master.host, port, pool.memory)
            commands["mooncake_client"] = command
        ends = {}
        for name, command in commands.items():
            process = await stack.enter_async_context(_running(command))
            ends[asyncio.create_task(process.wait())] = name
        stopped = asyncio.create_task(stop.wait())
        started = asyncio.create_task(_until_it_answers(pool))
        done = await _first(stopped, started, *ends)
        if started in done:
            started.result()
            announce()
            done = await _first(stopped, *ends)
        if stopped not in done:
            ended = next(task for task in ends if task in done)
            raise PoolUnavailable(
                f"{ends[ended]} ended with exit code {ended.result()}; its last lines are above. "
                "The pool is stopped, and what it kept is lost; engines go on without it."
            )


async def _first(*tasks: asyncio.Task[Any]) -> set[asyncio.Task[Any]]:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return done


@asynccontextmanager
async def _running(command: Sequence[str]) -> AsyncIterator[Process]:
    """A process in a session of its own: a terminal's Ctrl-C ends it by way of this one."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=_STDERR, env={**os.environ, **STORE_ENVIRONMENT}, start_new_session=True
    )
    try:
        yield process
    finally:
        await _end(process)


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:  # it is stuck
        process.kill()
        await process.wait()


async def _until_it_answers(pool: LocalPool) -> None:
    http = MasterHttp(pool.master)
    try:
        async with asyncio.timeout(_START_S):
            while not await asyncio.to_thread(answers, http, pool):
                await asyncio.sleep(_PROBE_S)
    except TimeoutError as error:
        raise PoolUnavailable(
            f"the pool at {pool.master} did not come up within {_START_S:.0f} s; what its "
            "processes said is above"
        ) from error


def answers(http: MasterHttp, pool: LocalPool) -> bool:
    """Whether the master serves, and its store lends what it is to lend."""
    try:
        return http.state() == "serving" and http.segments() >= bool(pool.memory)
    except PoolUnavailable:
        return False  # not yet


def _check_free(host: str, port: int, option: str) -> None:
    """Mooncake itself ends without saying why."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PoolUnavailable(
                f"cannot listen on {host}:{port}: {error.strerror}. Give another {option}, or see "
                "with `kvpp pool status` whether a pool is up already."
            ) from error
