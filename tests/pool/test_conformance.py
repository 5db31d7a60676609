"""Every backend keeps the contract of backends/base.py, over each store that can run here.

Field reports 4.1 (found at lookup, gone at load), 4.2 (one object of a batch fails, and no other),
4.3 (what does not fit is refused alone).
"""

from __future__ import annotations

import threading

import pytest

from kvpp_connectors.pool.store.base import PoolUnavailable, Store, StoreOutcome, StoreResult
from tests.pool.memory import Memory, bytes_of
from tests.pool.stores import SEGMENT, StoreUnderTest

SIZE = 5_003  # bytes; a prime, so that no piece is aligned


def filled(store: StoreUnderTest, name: str, size: int = SIZE) -> Memory:
    return Memory.holding(bytes_of(name, size), 1 if store.packed else 3)


def empty(store: StoreUnderTest, size: int = SIZE) -> Memory:
    """As ``filled``, but the bytes are others."""
    return Memory.holding(bytes(size), 1 if store.packed else 3)


def put(store: StoreUnderTest, keys: list[str], size: int = SIZE) -> list[StoreOutcome]:
    memories = [filled(store, key, size) for key in keys]
    return store.backend.put(keys, [memory.buffer for memory in memories])


def get(store: StoreUnderTest, key: str, size: int = SIZE) -> tuple[StoreOutcome, bytes]:
    memory = empty(store, size)
    (outcome,) = store.backend.get([key], [memory.buffer])
    return outcome, memory.data


def test_what_was_put_comes_back_byte_for_byte_to_another_client(
    store: StoreUnderTest, prefix: str
) -> None:
    keys = [f"{prefix}{i}" for i in range(7)]
    assert [o.result for o in put(store, keys)] == [StoreResult.STORED] * 7
    for key in keys:
        assert store.read(key) == bytes_of(key, SIZE)
    memories = [empty(store) for _ in keys]
    outcomes = store.second().get(keys, [memory.buffer for memory in memories])
    assert [o.result for o in outcomes] == [StoreResult.LOADED] * 7
    assert [memory.data for memory in memories] == [bytes_of(key, SIZE) for key in keys]


def test_one_missing_key_fails_alone(store: StoreUnderTest, prefix: str) -> None:
    keys = [f"{prefix}{i}" for i in range(3)]
    put(store, [keys[0], keys[2]])
    assert store.backend.exist(keys) == [True, False, True]
    memories = [empty(store) for _ in keys]
    outcomes = store.backend.get(keys, [memory.buffer for memory in memories])
    assert [o.result for o in outcomes] == [
        StoreResult.LOADED,
        StoreResult.MISSING,
        StoreResult.LOADED,
    ]
    assert memories[2].data == bytes_of(keys[2], SIZE)


def test_a_second_put_keeps_the_first_bytes_and_says_so(store: StoreUnderTest, prefix: str) -> None:
    put(store, [prefix])
    other = filled(store, "other")
    (outcome,) = store.backend.put([prefix], [other.buffer])
    assert outcome.result is StoreResult.ALREADY_THERE and outcome.ok
    assert store.read(prefix) == bytes_of(prefix, SIZE)


@pytest.mark.parametrize("size", [1, SIZE - 1, SIZE + 1, 3 * SIZE])
def test_another_length_is_told_from_a_load(store: StoreUnderTest, prefix: str, size: int) -> None:
    put(store, [prefix])
    store.replace(prefix, bytes(size))
    outcome, _ = get(store, prefix)
    assert outcome.result is StoreResult.WRONG_LENGTH, outcome
    assert not outcome.ok and outcome.words


def test_evicted_between_lookup_and_load_is_a_miss(store: StoreUnderTest, prefix: str) -> None:
    put(store, [prefix])
    assert store.backend.exist([prefix]) == [True]
    store.remove(prefix)
    outcome, _ = get(store, prefix)
    assert outcome.result is StoreResult.MISSING and outcome.code is not None and outcome.words
    assert store.backend.exist([prefix]) == [False]


def test_what_never_fits_is_no_space_and_the_rest_is_stored(
    store: StoreUnderTest, prefix: str
) -> None:
    keys = [f"{prefix}{i}" for i in range(3)]
    sizes = [SIZE, SEGMENT + 1, SIZE]
    memories = [filled(store, key, size) for key, size in zip(keys, sizes, strict=True)]
    outcomes = store.backend.put(keys, [memory.buffer for memory in memories])
    assert [o.result for o in outcomes] == [
        StoreResult.STORED,
        StoreResult.NO_SPACE,
        StoreResult.STORED,
    ]
    assert store.backend.exist(keys) == [True, False, True]


def test_each_load_of_a_batch_ends_for_itself(store: StoreUnderTest, prefix: str) -> None:
    keys = [f"{prefix}{i}" for i in range(5)]
    put(store, keys)
    store.remove(keys[1])
    store.replace(keys[2], bytes(SIZE - 1))
    store.replace(keys[3], bytes(SIZE + 1))
    memories = [empty(store) for _ in keys]
    outcomes = store.backend.get(keys, [memory.buffer for memory in memories])
    assert [o.result for o in outcomes] == [
        StoreResult.LOADED,
        StoreResult.MISSING,
        StoreResult.WRONG_LENGTH,
        StoreResult.WRONG_LENGTH,
        StoreResult.LOADED,
    ]
    data = [memory.data for memory in memories]  # nothing around any of them was written
    assert (data[0], data[4]) == (bytes_of(keys[0], SIZE), bytes_of(keys[4], SIZE))


def test_each_save_of_a_batch_ends_for_itself(store: StoreUnderTest, prefix: str) -> None:
    keys = [f"{prefix}{i}" for i in range(4)]
    put(store, keys[1:2])
    sizes = [SIZE, SIZE, SEGMENT + 1, 1]
    memories = [filled(store, key, size) for key, size in zip(keys, sizes, strict=True)]
    outcomes = store.backend.put(keys, [memory.buffer for memory in memories])
    assert [o.result for o in outcomes] == [
        StoreResult.STORED,
        StoreResult.ALREADY_THERE,
        StoreResult.NO_SPACE,
        StoreResult.STORED,
    ]
    assert store.second().exist(keys) == [True, True, False, True]


def test_what_was_evicted_may_be_saved_anew(store: StoreUnderTest, prefix: str) -> None:
    put(store, [prefix])
    store.remove(prefix)
    again = filled(store, "other", 2 * SIZE)
    assert store.backend.put([prefix], [again.buffer])[0].result is StoreResult.STORED
    assert store.read(prefix) == bytes_of("other", 2 * SIZE)
    assert get(store, prefix)[0].result is StoreResult.WRONG_LENGTH


def test_of_many_who_save_one_key_one_is_kept_whole(store: StoreUnderTest, prefix: str) -> None:
    """Two engines with one prompt: what lies there is one of their objects, never a mixture."""
    names = [f"{prefix}{i}" for i in range(4)]
    clients = [store.second() for _ in names]
    start = threading.Barrier(len(names))
    results: dict[str, StoreResult] = {}

    def save(name: str, client: Store) -> None:
        memory = filled(store, name, 1 << 20)
        start.wait(30)
        results[name] = client.put([prefix], [memory.buffer])[0].result

    threads = [
        threading.Thread(target=save, args=pair) for pair in zip(names, clients, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert StoreResult.STORED in results.values(), results
    assert store.read(prefix) in [bytes_of(name, 1 << 20) for name in names]
    store.remove(prefix)


def test_no_keys_are_no_call(store: StoreUnderTest) -> None:
    assert store.backend.exist([]) == []
    assert store.backend.put([], []) == []
    assert store.backend.get([], []) == []


def test_connect_again_and_register_again_are_legal(store: StoreUnderTest) -> None:
    memory = Memory([4096])
    address, size = memory.buffer.addresses[0], memory.buffer.sizes[0]
    client = store.second()
    client.register(address, size)
    client.register(address, size)
    client.connect()
    client.close()


def test_several_threads_share_a_client(store: StoreUnderTest, prefix: str) -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        keys = [f"{prefix}{number}-{i}" for i in range(8)]
        if not all(outcome.ok for outcome in put(store, keys)):
            failures.append(f"put {number}")
        for key in keys:
            outcome, data = get(store, key)
            if not outcome.ok or data != bytes_of(key, SIZE):
                failures.append(f"{key}: {outcome}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_a_closed_client_is_unavailable_and_no_crash(store: StoreUnderTest, prefix: str) -> None:
    client: Store = store.second()
    client.close()
    client.close()
    memory = filled(store, prefix)
    with pytest.raises(PoolUnavailable, match="closed"):
        client.exist([prefix])
    with pytest.raises(PoolUnavailable, match="closed"):
        client.connect()
    for outcomes in (client.put([prefix], [memory.buffer]), client.get([prefix], [memory.buffer])):
        assert [o.result for o in outcomes] == [StoreResult.UNAVAILABLE]
