"""`kvpp pool` on a real mooncake_master: as a person runs it, and as it fails.

Field report 4.7: what clears the pool must not wipe what others have, nor what is being read.
"""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from kvpp_connectors.cli import pool as command
from kvpp_connectors.cli.main import app
from kvpp_connectors.mooncake_admin.master_http import MasterHttp, status_of
from kvpp_connectors.mooncake_admin.servers import MasterAddress
from kvpp_connectors.pool.keys import LayerId, Namespace, Shard, Topology
from kvpp_connectors.pool.store.base import PoolUnavailable
from kvpp_connectors.pool.store.mooncake import MooncakeStore
from kvpp_connectors.pool.store.mooncake_settings import read_mooncake_settings
from tests.pool.master import Master, wait_until
from tests.pool.memory import Memory, bytes_of
from tests.pool.stores import SEGMENT, MooncakeUnderTest
from tests.pool.test_keys import BASE, HASH, KVPP

START_S = 60.0
SIZE = 1000
SPLIT = Namespace(BASE, Topology.replicated([["a"], ["b"]]))
WHOLE = Namespace(BASE, Topology.replicated([["a"]]))  # its name begins that of SPLIT
LAYERS = Namespace(BASE, KVPP)
STAGE_1 = Shard(1, 0)
KEYS = [
    LAYERS.layer_key(HASH, Shard(0, 1), LayerId(False, 2)),
    LAYERS.layer_key(HASH, Shard(0, 1), LayerId(False, 10)),
    LAYERS.layer_key(HASH, Shard(0, 1), LayerId(True, 0)),
    LAYERS.commit_key(HASH, Shard(0, 1)),
    WHOLE.block_key(HASH, Shard(0, 0)),
    WHOLE.block_key(HASH[::-1], Shard(0, 0)),
    SPLIT.block_key(HASH, STAGE_1),
]
FOREIGN = "somebody, else's/key"


def kvpp(*words: object, at: MasterAddress | None = None, answer: str | None = None) -> Result:
    """`kvpp pool ...` in this process."""
    where = [] if at is None else ["--master", at, "--http-port", at.http_port]
    arguments = [str(word) for word in ("pool", *words, *where)]
    return CliRunner().invoke(app, arguments, input=answer)


def put(backend: Any, *keys: str) -> None:
    memories = [Memory.holding(bytes_of(key, SIZE), 1) for key in keys]
    outcomes = backend.put(keys, [memory.buffer for memory in memories])
    assert all(outcome.ok for outcome in outcomes), outcomes


@pytest.fixture
def filled(master: Master) -> Iterator[MooncakeUnderTest]:
    """A pool of leases of 200 ms with objects of three namespaces and one of nobody."""
    store = MooncakeUnderTest(master, packed=True)
    put(store.backend, *KEYS, FOREIGN)
    yield store
    store.close()


@pytest.mark.process
def test_status_counts_what_is_there_and_grants_no_lease(
    master: Master, filled: MooncakeUnderTest
) -> None:
    assert filled.raw.get(KEYS[0]) == bytes_of(KEYS[0], SIZE)
    result = kvpp("status", "--json", at=master.at)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    counted = {n.pop("namespace"): n for n in found.pop("namespaces")}
    assert counted == {
        LAYERS.prefix: {"blocks": 0, "layers": 3, "markers": 1, "bytes": 4 * SIZE},
        WHOLE.prefix: {"blocks": 2, "layers": 0, "markers": 0, "bytes": 2 * SIZE},
        SPLIT.prefix: {"blocks": 1, "layers": 0, "markers": 0, "bytes": SIZE},
    }
    expected = {"state": "serving", "stores": 1, "capacity_bytes": SEGMENT, "keys": 8}
    assert {**found, **expected, "other_keys": 1} == found
    assert found["used_bytes"] >= 8 * SIZE
    assert (found["reads"], found["read_hits"], found["read_bytes"]) == (1, 1, SIZE)
    assert (found["lookups"], found["evicted_keys"]) == (17, 0)  # put asks twice, connect once

    words = kvpp("status", at=master.at).output
    assert f"       2        0        0     2.0 KiB  {WHOLE.prefix}\n" in words
    assert "objects   8, of them 1 not of this connector" in words

    def goes() -> bool:  # and status asked in between
        status_of(MasterHttp(master.at))
        return bool(filled.raw.remove(KEYS[0]) == 0)

    wait_until(goes, START_S, "the end of a lease")


@pytest.mark.process
def test_ls_tells_blocks_layers_and_markers_apart(
    master: Master, filled: MooncakeUnderTest
) -> None:
    assert kvpp("ls", at=master.at).output.count(HASH.hex()) == 6
    result = kvpp("ls", LAYERS.prefix, at=master.at)
    lines = [line.split() for line in result.output.splitlines()]
    assert lines == [
        [LAYERS.prefix, "(4", "objects)"],
        ["layer", "pp0r1", "t2", "1000", HASH.hex()],
        ["layer", "pp0r1", "t10", "1000", HASH.hex()],
        ["layer", "pp0r1", "d0", "1000", HASH.hex()],
        ["marker", "pp0r1", "1000", HASH.hex()],
    ]
    cut = kvpp("ls", LAYERS.prefix, "--limit", 1, at=master.at).output
    assert "... 3 more (--limit 0)" in cut
    listed = json.loads(kvpp("ls", "--json", "--limit", 0, at=master.at).output)
    assert sorted(row["key"] for rows in listed.values() for row in rows) == sorted(KEYS)
    (only,) = listed[SPLIT.prefix]
    assert (only["kind"], only["shard"], only["bytes"]) == ("block", "pp1r0", SIZE)


@pytest.mark.process
def test_clear_takes_one_namespace_once_its_leases_end(
    master: Master, filled: MooncakeUnderTest
) -> None:
    """A namespace whose name begins another's takes nothing of it."""
    refused = kvpp("clear", WHOLE.prefix, at=master.at, answer="n\n")
    assert refused.exit_code == 2
    assert len(MasterHttp(master.at).keys()) == 8
    result = kvpp("clear", WHOLE.prefix, at=master.at, answer="y\n")
    assert result.exit_code == 0, result.output
    assert f"removed {WHOLE.prefix} (2 objects, 2.0 KiB)" in result.output
    left = set(MasterHttp(master.at).keys())
    assert left == {FOREIGN, *(key for key in KEYS if not key.startswith(f"{WHOLE.prefix}@"))}


@pytest.mark.process
@pytest.mark.parametrize("equal", [False, True], ids=["other objects", "objects of equal names"])
def test_clear_removes_nothing_where_the_ports_are_of_two_masters(
    master: Master, filled: MooncakeUnderTest, equal: bool
) -> None:
    """It would ask one about its objects, and remove the other's."""
    other = Master()
    store = MooncakeUnderTest(other, packed=True)
    try:
        put(store.backend, *(KEYS if equal else KEYS[5:]))
        mixed = MasterAddress(other.at.host, other.at.port, master.at.http_port)
        result = kvpp("clear", WHOLE.prefix, "--yes", at=mixed)
        assert result.exit_code == 1
        assert "are not of one mooncake_master" in result.output
        assert len(MasterHttp(master.at).keys()) == 8
        assert len(MasterHttp(other.at).keys()) == (7 if equal else 2)
    finally:
        store.close()
        other.stop()


@pytest.mark.process
def test_clear_names_what_there_is_for_what_there_is_not(
    master: Master, filled: MooncakeUnderTest
) -> None:
    for wrong in ("", ".*", "kvpp1", WHOLE.prefix[:-1], f"{WHOLE.prefix}@", KEYS[4]):
        result = kvpp("clear", wrong, "--yes", at=master.at)
        assert result.exit_code == 1, wrong
        assert f"no objects under {wrong!r}" in result.output
        assert WHOLE.prefix in result.output
    assert len(MasterHttp(master.at).keys()) == 8


@pytest.mark.process
def test_clear_leaves_what_is_in_use_and_says_so(
    shared_master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases of 10 s, and no patience: a reader of the object must not get another's bytes."""
    monkeypatch.setattr(command, "_LEASES_S", 0.0)
    store = MooncakeUnderTest(shared_master, packed=True)
    put(store.backend, KEYS[-1])
    result = kvpp("clear", SPLIT.prefix, "--yes", at=shared_master.at)
    assert result.exit_code == 1
    assert f"1 objects of {SPLIT.prefix} are left" in result.output
    assert store.read(KEYS[-1]) == bytes_of(KEYS[-1], SIZE)
    store.close()


@pytest.mark.parametrize("words", [("status",), ("ls",), ("clear", "x", "--yes")])
def test_no_master_is_said_with_what_to_do(
    words: tuple[str, ...], ports: Callable[[int], Sequence[int]]
) -> None:
    nobody = MasterAddress("127.0.0.1", *ports(2))
    result = kvpp(*words, at=nobody)
    assert result.exit_code == 1
    assert f"no mooncake_master answers at http://127.0.0.1:{nobody.http_port}" in result.output
    assert "kvpp pool up" in result.output


@pytest.mark.process
def test_a_stuck_master_is_left_after_a_bound(master: Master) -> None:
    master.signal(signal.SIGSTOP)
    with pytest.raises(PoolUnavailable, match=r"did not answer within 0.2 s: it is stuck"):
        MasterHttp(master.at, timeout_s=0.2).state()


@pytest.mark.process
def test_what_is_no_master_is_named(master: Master) -> None:
    """The two ports in each other's place."""
    exchanged = MasterAddress(master.at.host, master.at.http_port, master.at.port)
    result = kvpp("status", at=exchanged)
    assert result.exit_code == 1
    assert "is the master's --metrics_port" in result.output or "stuck" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status", "--master", "nowhere"), "--master 'nowhere' is not HOST:PORT"),
        (("up", "--host", "0.0.0.0"), "give one address of this host"),
        (("up", "--memory", "1MB"), "16MB and more"),
        (("up", "--memory", "much"), "16MB and more"),
    ],
)
def test_a_wrong_option_is_refused(words: tuple[str, ...], said: str) -> None:
    result = kvpp(*words)
    assert (result.exit_code, said in result.output) == (2, True), result.output


@contextmanager
def going_up(at: MasterAddress, memory: str = "64MB") -> Iterator[subprocess.Popen[str]]:
    """`kvpp pool up` as a process."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvpp_connectors.cli", "pool", "up", f"--port={at.port}"),
            *(f"--http-port={at.http_port}", f"--memory={memory}"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()  # and with it what it started
        process.communicate(timeout=START_S)


def config_of(output: IO[str] | None) -> dict[str, Any]:
    """The configuration that `up` prints, as a shell would take it."""
    assert output is not None
    line = next(line for line in output if line.startswith("--kv-transfer-config"))
    found: dict[str, Any] = json.loads(shlex.split(line)[1])
    return found


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_gives_engines_a_pool_and_takes_it_all_away(
    number: int, ports: Callable[[int], Sequence[int]]
) -> None:
    at = MasterAddress("127.0.0.1", *ports(2))
    with going_up(at) as process:
        config = config_of(process.stdout)
        settings = read_mooncake_settings(config["kv_connector_extra_config"], {})
        assert settings.global_segment_size == 0
        backend = MooncakeStore(settings, "127.0.0.1", "tcp", settings.global_segment_size)
        backend.connect()
        put(backend, KEYS[0])
        backend.close()
        status = status_of(MasterHttp(at))
        assert (status.capacity_bytes, status.keys) == (64 << 20, 1)
        process.send_signal(number)
        assert process.wait(START_S) == 0
    assert not listens(at.port)
    assert not listens(at.http_port)


@pytest.mark.process
def test_up_ends_with_its_store(ports: Callable[[int], Sequence[int]]) -> None:
    """A pool without memory must not look as if all were well."""
    at = MasterAddress("127.0.0.1", *ports(2))
    with going_up(at) as process:
        config_of(process.stdout)
        children = psutil.Process(process.pid).children()
        next(child for child in children if child.name() == "mooncake_client").kill()
        assert process.wait(START_S) == 1
        assert process.stderr is not None
        assert "mooncake_client ended with exit code -9" in process.stderr.read()
    assert not listens(at.port)


@pytest.mark.process
def test_up_says_which_port_is_taken(master: Master, ports: Callable[[int], Sequence[int]]) -> None:
    result = kvpp("up", "--port", master.at.port, "--http-port", *ports(1))
    assert result.exit_code == 1
    assert f"cannot listen on {master.address}: Address already in use" in result.output
    assert "another --port" in result.output
