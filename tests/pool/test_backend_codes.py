"""What a store answers, however odd, becomes one outcome a key, in words. Over scripted clients.

Field report 7.3: codes in words.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpp_connectors.pool.store.base import Buffer, PoolUnavailable, Store, StoreResult
from kvpp_connectors.pool.store.memcache import MemCacheStore, MemoryKind
from kvpp_connectors.pool.store.mooncake import MooncakeStore
from kvpp_connectors.pool.store.mooncake_settings import (
    MooncakeSettings,
    read_mooncake_settings,
)
from kvpp_core.errors import KvppError

KEYS = ["a", "b"]
ONE_PIECE = [Buffer((4096,), (10,))] * 2
PIECES = [Buffer((4096, 8192), (4, 6))] * 2


class Client:
    """A store's client whose moves answer as told."""

    def __init__(self) -> None:
        self.answer: Callable[[list[str]], Any] = lambda keys: [0] * len(keys)
        self.exists: Callable[[list[str]], Any] = lambda keys: [0] * len(keys)
        self.set_up = 0
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.size = -704

    def setup(self, *args: Any, **named: Any) -> int:
        self.calls.append(("setup", args))
        return self.set_up

    def init(self, device: int, init_bm: bool) -> int:
        self.calls.append(("init", (device, init_bm)))
        return self.set_up

    def batch_is_exist(self, keys: list[str]) -> Any:
        return self.exists(keys)

    def register_buffer(self, address: int, size: int) -> int:
        self.calls.append(("register_buffer", (address, size)))
        return 0 if size > 1 else -600

    def get_size(self, key: str) -> int:
        return self.size

    def get_hostname(self) -> str:
        return "here"

    def close(self) -> int:
        self.calls.append(("close", ()))
        return 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        assert name.startswith("batch_"), name

        def call(*args: Any) -> Any:
            self.calls.append((name, args))
            return self.answer(args[0])

        return call


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    scripted = Client()
    monkeypatch.setattr("mooncake.store.MooncakeDistributedStore", lambda: scripted)
    return scripted


def mooncake(protocol: str = "tcp", **settings: Any) -> MooncakeStore:
    given = MooncakeSettings(
        master_server_address="etcd://nowhere",
        verify_puts=False,
        no_space_waits_ms=(1,),
        **settings,
    )
    backend = MooncakeStore(given, "127.0.0.1", protocol, 1 << 30)
    backend.connect()
    return backend


def memcache(client: Client, tmp_path: Path, kind: MemoryKind = MemoryKind.HOST) -> MemCacheStore:
    config = tmp_path / "mmc-local.conf"
    config.touch()
    environment = {"MMC_LOCAL_CONFIG_PATH": str(config)}
    backend = MemCacheStore(kind, 3, True, environment, lambda: client)
    backend.connect()
    return backend


@pytest.fixture(params=["mooncake", "memcache"])
def backend(request: pytest.FixtureRequest, client: Client, tmp_path: Path) -> Store:
    return mooncake() if request.param == "mooncake" else memcache(client, tmp_path)


def raising(keys: list[str]) -> Any:
    raise RuntimeError("the binding broke")


def codes(**by_key: int) -> Callable[[list[str]], list[int]]:
    """Answers each key with its code."""
    return lambda keys: [by_key[key] for key in keys]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda keys: [0], "gave 1 codes for 2 keys"),
        (lambda keys: [0, 0, 0], "gave 3 codes for 2 keys"),
        (lambda keys: None, "answered NoneType"),
        (lambda keys: 0, "answered int"),
        (lambda keys: [0, None], "answered list"),
        (raising, "RuntimeError: the binding broke"),
    ],
)
def test_what_is_no_answer_fails_every_key(
    backend: Store, client: Client, answer: Callable[[list[str]], Any], says: str
) -> None:
    client.answer = answer
    for outcomes in (backend.put(KEYS, ONE_PIECE), backend.get(KEYS, ONE_PIECE)):
        assert [outcome.result for outcome in outcomes] == [StoreResult.FAILED] * 2
        assert says in outcomes[0].words
    client.exists = answer
    with pytest.raises(PoolUnavailable, match=says):
        backend.exist(KEYS)
    assert [o.result for o in backend.put(KEYS, ONE_PIECE)] == [StoreResult.UNAVAILABLE] * 2


@pytest.mark.parametrize("code", [-4711, -1, -200, -703, -704, -705, -706, -707, -800, -900, -901])
def test_no_code_is_taken_for_success_and_each_has_words(client: Client, code: int) -> None:
    backend = mooncake()
    client.answer = codes(a=code, b=10)
    failed, good = backend.get(KEYS, ONE_PIECE)
    assert good.result is StoreResult.LOADED
    assert failed.code == code and failed.words and str(code) in str(failed)
    assert not failed.ok
    client.answer = codes(a=code, b=0)
    failed, good = backend.put(KEYS, ONE_PIECE)
    assert good.result is StoreResult.STORED
    assert failed.result is not StoreResult.STORED and failed.words and failed.code == code


@pytest.mark.parametrize(
    ("code", "result"),
    [
        (-200, StoreResult.NO_SPACE),
        (-600, StoreResult.FAILED),
        (-704, StoreResult.MISSING),
        (-703, StoreResult.MISSING),
        (-707, StoreResult.LEASE_EXPIRED),
        (-800, StoreResult.FAILED),
        (-900, StoreResult.UNAVAILABLE),
        (-901, StoreResult.UNAVAILABLE),
        (-1700, StoreResult.NO_SPACE),
        (0, StoreResult.FAILED),
        (9, StoreResult.WRONG_LENGTH),
        (11, StoreResult.WRONG_LENGTH),
    ],
)
def test_mooncake_codes_of_a_load(client: Client, code: int, result: StoreResult) -> None:
    client.answer = codes(a=code, b=code)
    assert [o.result for o in mooncake().get(KEYS, ONE_PIECE)] == [result] * 2


@pytest.mark.parametrize(
    ("code", "size", "result"),
    [
        (-600, 11, StoreResult.WRONG_LENGTH),
        (-800, 9, StoreResult.WRONG_LENGTH),
        (-600, 10, StoreResult.FAILED),
        (-800, 10, StoreResult.FAILED),
        (-800, -704, StoreResult.FAILED),
    ],
)
def test_mooncake_says_wrong_length_in_other_words_for_pieces(
    client: Client, code: int, size: int, result: StoreResult
) -> None:
    client.answer, client.size = codes(a=code, b=10), size
    assert [o.result for o in mooncake().get(KEYS, PIECES)] == [result, StoreResult.LOADED]


def test_a_load_that_failed_in_transfer_is_tried_once_more_alone(client: Client) -> None:
    answers = iter([[-800, 10], [10]])
    client.answer = lambda keys: next(answers)
    assert [o.result for o in mooncake().get(KEYS, ONE_PIECE)] == [StoreResult.LOADED] * 2
    names = [args[0] for name, args in client.calls if name == "batch_get_into"]
    assert names == [["a", "b"], ["a"]]


def test_no_space_is_tried_again_for_those_keys_alone(client: Client) -> None:
    answers = iter([[-200, 0], [0]])
    client.answer = lambda keys: next(answers)
    assert [o.result for o in mooncake().put(KEYS, ONE_PIECE)] == [StoreResult.STORED] * 2
    names = [args[0] for name, args in client.calls if name == "batch_put_from"]
    assert names == [["a", "b"], ["a"]]


def test_pieces_go_by_the_call_for_pieces(client: Client) -> None:
    backend = mooncake("rdma")
    assert not backend.packed
    backend.put(KEYS, PIECES)
    client.answer = codes(a=10, b=10)
    backend.get(KEYS, PIECES)
    moves = [(name, args) for name, args in client.calls if name.startswith("batch_")]
    assert [name for name, _ in moves] == [
        "batch_put_from_multi_buffers",
        "batch_get_into_multi_buffers",
    ]
    for _, args in moves:
        assert args[1:3] == ([[4096, 8192]] * 2, [[4, 6]] * 2)


def test_memory_is_registered_once_connected_and_a_refusal_is_told(client: Client) -> None:
    settings = MooncakeSettings(master_server_address="etcd://nowhere")
    backend = MooncakeStore(settings, "127.0.0.1", "rdma", 0)
    backend.register(4096, 100)
    assert client.calls == []
    backend.connect()
    backend.register(4096, 100)
    assert [call for call in client.calls if call[0] == "register_buffer"] == [
        ("register_buffer", (4096, 100))
    ]
    with pytest.raises(KvppError, match=r"did not register 1 bytes at 0x2000 over rdma"):
        backend.register(8192, 1)


def test_a_client_that_does_not_start_says_where_and_is_dropped(client: Client) -> None:
    client.set_up = -1
    with pytest.raises(PoolUnavailable, match=r"on 127\.0\.0\.1 over tcp .* master etcd://nowhere"):
        mooncake()


@pytest.mark.parametrize(
    ("code", "put", "get"),
    [
        (-1, StoreResult.NO_SPACE, StoreResult.FAILED),
        (-2, StoreResult.FAILED, StoreResult.FAILED),
        (-3004, StoreResult.UNAVAILABLE, StoreResult.UNAVAILABLE),
        (-3006, StoreResult.ALREADY_THERE, StoreResult.FAILED),
        (-3007, StoreResult.MISSING, StoreResult.MISSING),
        (-3012, StoreResult.WRONG_LENGTH, StoreResult.WRONG_LENGTH),
        (-3013, StoreResult.NO_SPACE, StoreResult.NO_SPACE),
        (-3014, StoreResult.UNAVAILABLE, StoreResult.UNAVAILABLE),
        (-3101, StoreResult.MISSING, StoreResult.MISSING),
        (-3106, StoreResult.LEASE_EXPIRED, StoreResult.LEASE_EXPIRED),
        (-9, StoreResult.FAILED, StoreResult.FAILED),
    ],
)
def test_memcache_codes(
    client: Client, tmp_path: Path, code: int, put: StoreResult, get: StoreResult
) -> None:
    backend = memcache(client, tmp_path)
    client.answer = codes(a=code, b=code)
    for outcomes, result in ((backend.put(KEYS, PIECES), put), (backend.get(KEYS, PIECES), get)):
        assert [outcome.result for outcome in outcomes] == [result] * 2
        assert outcomes[0].words and outcomes[0].code == code


@pytest.mark.parametrize(
    ("kind", "save", "load"), [(MemoryKind.HOST, 3, 2), (MemoryKind.DEVICE, 0, 1)]
)
def test_memcache_copies_by_the_kind_of_memory(
    client: Client, tmp_path: Path, kind: MemoryKind, save: int, load: int
) -> None:
    """H2G and G2H for host memory, L2G and G2L for a device's; MemCache refuses all else."""
    backend = memcache(client, tmp_path, kind)
    backend.put(KEYS, PIECES)
    backend.get(KEYS, PIECES)
    moves = {name: args for name, args in client.calls if name.startswith("batch_")}
    assert moves["batch_put_from_layers"] == (KEYS, [[4096, 8192]] * 2, [[4, 6]] * 2, save)
    assert moves["batch_get_into_layers"] == (KEYS, [[4096, 8192]] * 2, [[4, 6]] * 2, load)


def test_a_schedulers_memcache_client_never_registers_nor_moves(
    client: Client, tmp_path: Path
) -> None:
    (tmp_path / "conf").touch()
    environment = {"MMC_LOCAL_CONFIG_PATH": str(tmp_path / "conf")}
    backend = MemCacheStore(MemoryKind.HOST, 0, False, environment, lambda: client)
    backend.connect()
    backend.register(4096, 100)  # the real one would crash the process
    assert client.calls == [("init", (0, False))]
    with pytest.raises(KvppError, match="cannot save"):
        backend.put(KEYS, ONE_PIECE)


def test_memory_is_named_while_a_set_up_hangs(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MemCache's does at a stuck MetaService: the engine starts, and registers its caches."""
    (tmp_path / "conf").touch()
    environment = {"MMC_LOCAL_CONFIG_PATH": str(tmp_path / "conf")}
    backend = MemCacheStore(MemoryKind.HOST, 0, True, environment, lambda: client)
    inside, go_on = threading.Event(), threading.Event()

    def hangs(device: int, init_bm: bool) -> int:
        inside.set()
        return 0 if go_on.wait(60) else -1

    monkeypatch.setattr(client, "init", hangs)
    connecting = threading.Thread(target=backend.connect)
    naming = threading.Thread(target=backend.register, args=(4096, 100))
    connecting.start()
    assert inside.wait(30)
    naming.start()
    naming.join(30)
    held = naming.is_alive()
    go_on.set()
    connecting.join(30)
    naming.join(30)
    assert not held
    assert client.calls == [("register_buffer", (4096, 100))]


@pytest.mark.parametrize("answer", [[-3014], [-3004], None])
def test_a_memcache_client_that_starts_without_a_link_is_closed_and_another_one_made(
    client: Client, tmp_path: Path, answer: Any
) -> None:
    """As MemCache's are after one that did not start; it never links such a client later."""
    (tmp_path / "conf").touch()
    environment = {"MMC_LOCAL_CONFIG_PATH": str(tmp_path / "conf")}
    backend = MemCacheStore(MemoryKind.HOST, 0, True, environment, lambda: client)
    client.exists = lambda keys: answer
    with pytest.raises(PoolUnavailable, match="MemCache"):
        backend.connect()
    client.exists = lambda keys: [0] * len(keys)
    backend.connect()
    assert [name for name, _ in client.calls] == ["init", "close", "init"]


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "MMC_LOCAL_CONFIG_PATH = nothing: backend=memcache needs"),
        (
            {"MMC_LOCAL_CONFIG_PATH": "/nowhere/mmc.conf"},
            "mmc.conf: There is no such file",
        ),
    ],
)
def test_memcache_without_its_file_says_so(environment: dict[str, str], says: str) -> None:
    backend = MemCacheStore(MemoryKind.HOST, 0, True, environment, Client)
    with pytest.raises(PoolUnavailable, match=says):
        backend.connect()


def read(extra: dict[str, Any], **environment: str) -> MooncakeSettings:
    return read_mooncake_settings(extra, environment)


def test_settings_inline_win_over_the_file_and_the_environment_over_both(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps({"master_server_address": "file:1", "global_segment_size": "512MB"}))
    assert read({}, MOONCAKE_CONFIG_PATH=str(file)).global_segment_size == 512 << 20
    inline = {"mooncake": {"master_server_address": "inline:1", "protocol": "rdma"}}
    assert read(inline, MOONCAKE_CONFIG_PATH=str(file)).master_server_address == "inline:1"
    assert read(inline, MOONCAKE_MASTER="env:1").master_server_address == "env:1"
    assert read(inline, MOONCAKE_GLOBAL_SEGMENT_SIZE="4GiB").global_segment_size == 4 << 30


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"master_adress": "a:1"}, "no such key. Did you mean 'master_server_address'"),
        ({}, "master_server_address = nothing: It is missing. Expected: host:port"),
        ({"protocol": "udp"}, "Expected: tcp, rdma or ascend"),
        ({"global_segment_size": "4 MiB"}, "refuses segments under 16777216 bytes"),
        ({"global_segment_size": "much"}, "4GB is 4 << 30"),
        ({"local_hostname": "0.0.0.0"}, "means every interface"),
        ({"replica_num": 0}, "copies of each object"),
        ([], "is list; expected an object"),
        ({"master_server_address": "nohost"}, "the port is missing or none"),
        ({"master_server_address": "127.0.0.1:x"}, "the port is missing or none"),
        ({"master_server_address": "10.0.0.1"}, "the port is missing or none"),
        ({"master_server_address": "10.0.0.1:0"}, "the port is missing or none"),
        ({"master_server_address": "10.0.0.1:65536"}, "the port is missing or none"),
        ({"master_server_address": ":50051"}, "the port is missing or none"),
        ({"master_server_address": ""}, "the port is missing or none"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_expected(values: Any, says: str) -> None:
    if isinstance(values, dict) and "master_adress" not in values and values:
        values = {"master_server_address": "a:1", **values}
    with pytest.raises(KvppError) as caught:
        read({"mooncake": values})
    assert says in str(caught.value)
    assert "kv_connector_extra_config.mooncake" in str(caught.value)


def test_no_settings_and_an_unreadable_file_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(KvppError, match="MOONCAKE_CONFIG_PATH"):
        read({})
    (tmp_path / "broken").write_text("{")
    for path in (tmp_path / "none", tmp_path / "broken"):
        with pytest.raises(KvppError, match=f"{path}: The file cannot be read"):
            read({}, MOONCAKE_CONFIG_PATH=str(path))


@pytest.mark.parametrize("address", ["nohost:1", "127.0.0.1:1"])
def test_a_wrong_master_address_is_told_at_once(address: str) -> None:
    settings = MooncakeSettings(master_server_address=address)
    with pytest.raises(PoolUnavailable, match=address):
        MooncakeStore(settings, "127.0.0.1", "tcp", 0).connect()
