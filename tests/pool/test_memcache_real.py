"""The real memcache_hybrid: its MetaService and a scheduler's client. No NPU is needed for these.

An empty pool is all that there can be here: a worker's client needs an NPU, so that hits are tested
on the stand-in alone. The client runs in a process of its own, for it can crash one at its end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvpp_connectors.host import free_ports
from kvpp_connectors.pool.backends.base import PoolUnavailable
from kvpp_connectors.pool.backends.memcache import new_client
from tests.pool.master import wait_until

INSTALLED = importlib.util.find_spec("memcache_hybrid") is not None
needs_memcache = pytest.mark.skipif(not INSTALLED, reason="memcache-hybrid is not installed")
ROOT = Path(__file__).parents[2]
START_S, END_S = 30, 60

_CLIENT = """
import json, os, sys
from kvpp_connectors.pool.backends.base import PoolUnavailable
from kvpp_connectors.pool.backends.memcache import MemCacheBackend, MemoryKind
from kvpp_connectors.pool.guard import GuardedBackend
from kvpp_connectors.pool.lookup import Lookup
from kvpp_connectors.pool.stats import PoolStats
answer = {}
backend = MemCacheBackend(MemoryKind.HOST, 0, moves_data=sys.argv[1] == "worker")
try:
    backend.connect()
    backend.register(4096, 4096)
    answer["exist"] = backend.exist(["kvpp1@a", "kvpp1@b"])
    stats = PoolStats("scheduler")
    guard = GuardedBackend(backend, stats)
    answer["ready"] = guard.wait_ready(20)
    lookup = Lookup(guard.exist, stats, deadline_s=20)
    hit = lookup.ask("r", [["kvpp1@a"], ["kvpp1@b"]], 20)
    answer["hit"] = [hit.blocks, hit.shortened_by]
    lookup.close()
    guard.close()
    try:
        backend.exist(["kvpp1@a"])
    except PoolUnavailable as error:
        answer["closed"] = str(error)
except PoolUnavailable as error:
    answer["unavailable"] = str(error)
print("ANSWER" + json.dumps(answer), flush=True)
"""


class Meta(NamedTuple):
    process: subprocess.Popen[bytes]
    config: Path  # of its clients


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meta]:
    folder = tmp_path_factory.mktemp("memcache")
    ports = free_ports(3)
    (folder / "meta.conf").write_text(
        f"ock.mmc.meta_service_url = tcp://127.0.0.1:{ports[0]}\n"
        f"ock.mmc.meta_service.config_store_url = tcp://127.0.0.1:{ports[1]}\n"
        f"ock.mmc.meta_service.metrics_url = http://127.0.0.1:{ports[2]}\n"
        f"ock.mmc.log_path = {folder}\n"
        "ock.mmc.log_level = error\n"
    )
    config = folder / "local.conf"
    config.write_text(
        f"ock.mmc.meta_service_url = tcp://127.0.0.1:{ports[0]}\n"
        f"ock.mmc.local_service.config_store_url = tcp://127.0.0.1:{ports[1]}\n"
        "ock.mmc.local_service.protocol = host_shm\n"
        "ock.mmc.local_service.world_size = 16\n"
        "ock.mmc.local_service.dram.size = 128MB\n"
        "ock.mmc.client.timeout.seconds = 3\n"
        "ock.mmc.log_level = error\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", "from memcache_hybrid import MetaService; MetaService.main()"],
        # Its lock lies in the temporary folder, one a machine: in ours, one a test run.
        env={
            **os.environ,
            "MMC_META_CONFIG_PATH": str(folder / "meta.conf"),
            "TMPDIR": str(folder),
        },
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def listens() -> bool:
        assert process.poll() is None, f"MetaService ended with {process.returncode}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", ports[0])) == 0

    try:
        wait_until(listens, START_S, "MetaService's start")
        yield Meta(process, config)
    finally:
        process.kill()
        process.wait(END_S)


def ask(role: str, config: Path) -> dict[str, Any]:
    """What a client in a process of its own found."""
    ended = subprocess.run(
        [sys.executable, "-c", _CLIENT, role],
        env={**os.environ, "MMC_LOCAL_CONFIG_PATH": str(config)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=END_S,
    )
    lines = [line for line in ended.stdout.splitlines() if "ANSWER" in line]
    assert lines, f"exit code {ended.returncode}: {ended.stdout[-2000:]} {ended.stderr[-2000:]}"
    answer: dict[str, Any] = json.loads(lines[-1].split("ANSWER", 1)[1])
    return answer


@needs_memcache
def test_a_schedulers_client_looks_up_in_the_real_metaservice(meta: Meta) -> None:
    answer = ask("scheduler", meta.config)
    assert answer["exist"] == [False, False]
    assert answer["ready"] is True
    assert answer["hit"] == [0, "kvpp1@a"]
    assert "closed" in answer["closed"]


@needs_memcache
def test_a_workers_client_without_an_npu_says_what_it_needs(meta: Meta) -> None:
    answer = ask("worker", meta.config)
    assert "needs an NPU" in answer["unavailable"]


@needs_memcache
def test_a_metaservice_that_is_gone_is_unavailable(meta: Meta) -> None:
    meta.process.send_signal(signal.SIGKILL)
    meta.process.wait(END_S)
    answer = ask("scheduler", meta.config)
    assert "is its MetaService running" in answer["unavailable"]


@pytest.mark.skipif(INSTALLED, reason="memcache-hybrid is installed")
def test_without_the_package_the_remedy_is_named() -> None:
    with pytest.raises(PoolUnavailable, match="pip install memcache-hybrid"):
        new_client()
