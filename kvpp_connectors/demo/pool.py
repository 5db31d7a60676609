"""A Mooncake pool of the demo's own: a master, and a store that outlives the engines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvpp_connectors.connector.ports import reserved_ports
from kvpp_connectors.demo.children import Server
from kvpp_connectors.mooncake_admin.local_pool import LocalPool, answers
from kvpp_connectors.mooncake_admin.master_http import MasterHttp
from kvpp_connectors.mooncake_admin.servers import (
    STORE_ENVIRONMENT,
    MasterAddress,
    master_command,
    store_command,
)

__all__ = ["serving_pool"]

_HOST = "127.0.0.1"
_START_S, _LOOK_S = 30.0, 0.05


@contextmanager
def serving_pool(folder: Path, size: int) -> Iterator[LocalPool]:
    """A pool on free loopback ports, with its logs in ``folder``, until the block ends.

    ``size``: bytes that a store lends; 0: no store, engines lend memory.

    Raises:
        ChildFailed: a server ended, or there was no memory in time.
        KvppError: Mooncake is not installed.
    """
    with ExitStack() as stack:
        rpc, http, port = stack.enter_context(reserved_ports(3, _HOST))
        pool = LocalPool(MasterAddress(_HOST, rpc, http), size)
        commands = {"master": master_command(pool.master)}
        if size:
            commands["store"] = store_command(pool.master, _HOST, port, size)
        servers = [
            stack.enter_context(
                Server(
                    command,
                    title=name,
                    log=folder / f"{name}.log",
                    environment=STORE_ENVIRONMENT,
                )
            )
            for name, command in commands.items()
        ]
        _wait_for(pool, servers)
        yield pool


def _wait_for(pool: LocalPool, servers: Sequence[Server]) -> None:
    http, deadline = MasterHttp(pool.master), time.monotonic() + _START_S
    while not answers(http, pool):
        for server in servers:
            server.check()
        if time.monotonic() > deadline:
            raise servers[-1].failure(f"no pool within {_START_S:.0f} s")
        time.sleep(_LOOK_S)
