"""A real mooncake_master on free loopback ports, to be killed, stopped and started again."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvpp_connectors.connector.ports import reserved_ports
from kvpp_connectors.mooncake_admin.master_http import MasterHttp
from kvpp_connectors.mooncake_admin.servers import MasterAddress, master_command
from tests.signals import signal_group

__all__ = ["Master", "wait_until"]

_START_S = 30.0
_END_S = 10.0


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait for something that has no event, within a bound."""
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.02)


class Master:
    """The process. Its port stays the same over restarts."""

    def __init__(self, flags: Sequence[str] = ()) -> None:
        self._stack = ExitStack()
        self.at = MasterAddress("127.0.0.1", *self._stack.enter_context(reserved_ports(2)))
        self._log = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._flags = tuple(flags)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return str(self.at)

    def capacity(self) -> int:
        """Bytes that stores have lent to the pool."""
        return MasterHttp(self.at).metrics().get("master_total_capacity_bytes", 0)

    def start(self) -> None:
        self._process = subprocess.Popen(
            master_command(self.at, self._flags),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # so that what the console script starts ends with it
        )
        wait_until(self._listens, _START_S, "mooncake_master's start")

    def signal(self, number: int) -> None:
        assert self._process is not None
        signal_group(self._process.pid, number)

    def kill(self) -> None:
        """At once, without a farewell."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(_END_S)
        self._process = None

    def stop(self) -> None:
        """End of the test, whatever it did."""
        if self._process is not None:
            self.signal(signal.SIGCONT)
            self.kill()
        self._stack.close()

    def _listens(self) -> bool:
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-2000:]
            raise AssertionError(f"mooncake_master at {self.at} ended with {code}:\n{said}")
        try:
            socket.create_connection((self.at.host, self.at.port), 1).close()
        except OSError:
            return False
        return True
