"""A process that lends its memory to a Mooncake pool: `mooncake_client`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

from kvpp_connectors.connector.ports import reserved_ports
from kvpp_connectors.mooncake_admin.servers import STORE_ENVIRONMENT, store_command
from kvpp_connectors.pool.store.base import PoolUnavailable
from tests.pool.master import Master, wait_until
from tests.signals import signal_group

__all__ = ["StoreProcess", "lent_pool"]


_START_S = 30.0


class StoreProcess:
    """The process."""

    def __init__(self, master: Master, size: str) -> None:
        self.master = master
        before = master.capacity()
        self._stack = contextlib.ExitStack()
        (port,) = self._stack.enter_context(reserved_ports(1, master.at.host))
        self._process = subprocess.Popen(
            store_command(master.at, master.at.host, port, size),
            env={**os.environ, **STORE_ENVIRONMENT},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

        def is_lent() -> bool:
            try:
                return master.capacity() > before
            except PoolUnavailable:  # it may be busy with what went with another store
                return False

        wait_until(is_lent, _START_S, "the store's segment")

    def signal(self, number: int) -> None:
        """To the process and what the console script started."""
        signal_group(self._process.pid, number)

    def stop(self) -> None:
        """End it. Again is legal."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.wait(_START_S)
        self._stack.close()


@contextlib.contextmanager
def lent_pool(size: str = "512MB") -> Iterator[StoreProcess]:
    """A master and a store that hold what engines save; both end with the block."""
    master = Master()
    store = StoreProcess(master, size)
    try:
        yield store
    finally:
        store.stop()
        master.stop()
