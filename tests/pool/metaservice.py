"""MemCache's real MetaService, to be killed, stopped and started again, and clients of it.

Both run in processes of their own with MemCache on their path alone: its client can end a process
with a crash, and no other test is to find the package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpp_connectors.connector.ports import reserved_ports
from tests.pool.master import wait_until

__all__ = ["Client", "MetaService", "memcache_path"]

ROOT = Path(__file__).parents[2]
_LOCK = "/tmp/mmc_meta_service.lock"  # one a machine, wherever TMPDIR is
_START_S = 120.0  # another run of these tests may hold the lock
_END_S = 60.0  # a client's farewell to a MetaService that is gone takes 10 s


def memcache_path() -> str:
    """PYTHONPATH with memcache_hybrid and this project; skips the test where MemCache is not.

    Where it is promised, which CI does, it fails instead.
    """
    folder = Path(sys.prefix) / "memcache"  # by .ci/setup
    if folder.is_dir():
        return f"{ROOT}{os.pathsep}{folder}"
    if importlib.util.find_spec("memcache_hybrid") is not None:
        return str(ROOT)
    reason = f"memcache-hybrid is not in {folder}: `make setup` could not install .ci/memcache.txt"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


class MetaService:
    """The process. Its ports stay the same over restarts."""

    def __init__(self, folder: Path) -> None:
        self._path = memcache_path()
        self._folder = folder
        self._stack = ExitStack()
        self._meta, store, metrics = self._stack.enter_context(reserved_ports(3))
        (folder / "meta.conf").write_text(
            f"ock.mmc.meta_service_url = tcp://127.0.0.1:{self._meta}\n"
            f"ock.mmc.meta_service.config_store_url = tcp://127.0.0.1:{store}\n"
            f"ock.mmc.meta_service.metrics_url = http://127.0.0.1:{metrics}\n"
            f"ock.mmc.log_path = {folder}\n"
            "ock.mmc.log_level = error\n"
        )
        self.config = folder / "local.conf"  # of its clients
        self.config.write_text(
            f"ock.mmc.meta_service_url = tcp://127.0.0.1:{self._meta}\n"
            f"ock.mmc.local_service.config_store_url = tcp://127.0.0.1:{store}\n"
            "ock.mmc.local_service.protocol = host_shm\n"
            "ock.mmc.local_service.world_size = 16\n"
            "ock.mmc.local_service.dram.size = 128MB\n"
            "ock.mmc.log_level = error\n"
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, where it does not run. Waits for the end of another one on this machine."""
        if self._process is None:
            wait_until(self._started, _START_S, f"MetaService's start (another one holds {_LOCK}?)")

    def stop(self) -> None:
        """Until resume(): it answers nobody, yet its connections stay."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        wait_until(
            lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", _END_S, "the stop"
        )

    def resume(self) -> None:
        """After SIGSTOP. Legal in any state."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """At once, without a farewell. Again is legal."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_S)
            self._process = None

    def close(self) -> None:
        """End of its tests: it is not started again."""
        self.kill()
        self._stack.close()

    def _started(self) -> bool:
        """Whether it listens now; starts it anew where it has ended, as it does beside another."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from memcache_hybrid import MetaService as M; M.main()"],
                env=os.environ
                | {
                    "MMC_META_CONFIG_PATH": str(self._folder / "meta.conf"),
                    "PYTHONPATH": self._path,
                },
                cwd=self._folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._meta)) == 0


class Client:
    """A process with our backend over the real client; see memcache_client for what it does."""

    def __init__(self, config: Path, role: str = "scheduler") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pool.memcache_client", role],
            env=os.environ | {"MMC_LOCAL_CONFIG_PATH": str(config), "PYTHONPATH": memcache_path()},
            cwd=config.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def do(self, what: str, *arguments: Any) -> Any:
        """One of its methods; what it returned, or ``{"unavailable": words}``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, arguments]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # MemCache writes its log there, too
            _, found, answer = line.partition("ANSWER")
            if found:
                return json.loads(answer)
        pytest.fail(f"the client ended with {self._process.wait(_END_S)} at {what}")

    def end(self) -> int:
        """Let it close and end; its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(_END_S)

    def kill(self) -> None:
        """End of the test, whatever it did."""
        self._process.kill()
        self._process.wait(_END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
