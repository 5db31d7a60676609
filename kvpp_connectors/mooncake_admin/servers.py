"""A Mooncake pool's processes: mooncake_master, and mooncake_client, which lends it memory.

The one place that knows their options. Each listens on the address that is asked for, except that
the port by which a store's memory is read listens on all interfaces.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvpp_core.errors import KvppError

__all__ = ["STORE_ENVIRONMENT", "MasterAddress", "master_command", "store_command"]

# Without it Mooncake prefers any RDMA device to tcp, whatever its protocol option says.
STORE_ENVIRONMENT: Mapping[str, str] = {"MC_FORCE_TCP": "1"}


class MasterAddress(NamedTuple):
    """Where a mooncake_master is."""

    host: str
    port: int = 50051  # for engines and stores
    http_port: int = 9003  # for metrics and for people

    def __str__(self) -> str:
        """As in ``master_server_address``."""
        return f"{self.host}:{self.port}"


def master_command(master: MasterAddress, options: Sequence[str] = ()) -> list[str]:
    """Start a master with the metadata of a whole pool in its memory, and nothing on disk.

    Raises:
        KvppError: Mooncake is not installed.
    """
    return [
        _program("mooncake_master"),
        f"--rpc_address={master.host}",
        f"--rpc_port={master.port}",
        f"--metrics_host={master.host}",
        f"--metrics_port={master.http_port}",
        "--logtostderr=true",
        "--enable_metric_reporting=false",  # into the log, every few seconds; HTTP has them
        *options,
    ]


def store_command(master: MasterAddress, host: str, port: int, size: int | str) -> list[str]:
    """Start a store that lends ``size`` over tcp: 16 MiB or more, in bytes or such as ``4GB``.

    Raises:
        KvppError: Mooncake is not installed.
    """
    return [
        _program("mooncake_client"),
        f"--host={host}",
        f"--port={port}",
        f"--master_server_address={master}",
        "--metadata_server=P2PHANDSHAKE",
        f"--global_segment_size={size}",
        "--logtostderr=true",
    ]


def _program(name: str) -> str:
    """Next to this Python, where pip puts it; else in PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise KvppError(
            f"{name} is neither in {beside.parent} nor in PATH. Install mooncake-transfer-engine "
            "(mooncake-transfer-engine-non-cuda on CPU) and libibverbs1."
        )
    return found
