"""A process that lends its memory to a Mooncake pool: `mooncake_client`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from kvpp_connectors.host import free_ports
from tests.pool.master import Master, wait_until

__all__ = ["StoreProcess"]


_START_S = 30.0


class StoreProcess:
    """The process."""

    def __init__(self, master: Master, size: str) -> None:
        self.master = master
        before = master.capacity()
        self._process = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "mooncake_client"),
                "--host=127.0.0.1",
                f"--port={free_ports(1)[0]}",
                f"--master_server_address={master.address}",
                "--metadata_server=P2PHANDSHAKE",
                f"--global_segment_size={size}",
            ],
            env=os.environ | {"MC_FORCE_TCP": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(lambda: master.capacity() > before, _START_S, "the store's segment")

    def signal(self, number: int) -> None:
        """To the process and what the console script started."""
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End it."""
        self.signal(signal.SIGKILL)
        self._process.wait(_START_S)
