"""Blocks saved into every store and loaded back, byte by byte what their rank keeps.

That another's object is never loaded is S11 (tests/safety).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvpp_connectors.pool import block_objects, packing
from kvpp_connectors.pool.block_objects import (
    HEADER_BYTES,
    BlockObject,
    BlockStore,
    CommitMarks,
    Staging,
    read_header,
    write_header,
)
from kvpp_connectors.pool.packing import CacheBlocks, Inventory
from kvpp_connectors.pool.store.base import Buffer, StoreOutcome, StoreResult
from kvpp_core.errors import KvppError
from tests.core.rank_memory import RankMemory, uneven_model
from tests.pool.block_stores import LAYERS, RANKS, STAGING, objects, opened
from tests.pool.stores import MemCacheStandInStore, StoreUnderTest
from tests.pool.test_packing import caches_of, expected, memory_of
from tests.safety.faulty_store import FaultyStore


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_object_holds_its_owners_bytes_and_comes_back(
    store: StoreUnderTest, prefix: str, rank: int
) -> None:
    memory = memory_of(LAYERS, RANKS, rank)
    inventory = Inventory.kept(memory.placement)
    saved = opened(store, memory).save(objects(prefix, [5, 0, 3, 1, 2]))
    assert [outcome.result for outcome in saved] == [StoreResult.STORED] * 5
    for block in (5, 0, 3, 1, 2):
        data = store.read(f"{prefix}{block}")
        assert len(data) == HEADER_BYTES + inventory.payload_bytes
        assert data[HEADER_BYTES:] == expected(inventory, block, rank).numpy().tobytes()

    fresh = RankMemory(uneven_model(LAYERS).placement(RANKS, rank), 6)  # POISON everywhere
    loaded = opened(store, fresh).load(objects(prefix, [5, 0, 3, 1, 2]))
    assert [outcome.result for outcome in loaded] == [StoreResult.LOADED] * 5
    for ordinal in fresh.placement.owned:
        fresh.expect(ordinal, [0, 1, 2, 3, 5], generation=1)
    model = RankMemory(fresh.placement, 6)
    model.store_drafts(generation=1)
    for component in fresh.placement.drafts[0].components:
        for block in (0, 1, 2, 3, 5):
            row = fresh.rows(component)[block]
            assert torch.equal(row, model.rows(component)[block])
            row.fill_(0xFF)  # compared: what is left must be as it was
    assert fresh.difference() == []


def test_a_block_that_is_gone_leaves_its_rows_alone_and_the_others_load(
    store: StoreUnderTest, prefix: str
) -> None:
    memory = memory_of(LAYERS, RANKS, 0)
    opened(store, memory).save(objects(prefix, [0, 1, 2]))
    store.remove(f"{prefix}1")
    for ordinal in memory.placement.owned:
        memory.store(ordinal, generation=2)
    outcomes = opened(store, memory).load(objects(prefix, [0, 1, 2]))
    assert [o.result for o in outcomes] == [
        StoreResult.LOADED,
        StoreResult.MISSING,
        StoreResult.LOADED,
    ]
    for ordinal in memory.placement.owned:
        memory.expect(ordinal, [0, 2], generation=1)
    assert memory.difference() == []


def test_layers_alone_are_objects_with_one_staging(store: StoreUnderTest, prefix: str) -> None:
    memory, fresh = memory_of(LAYERS, RANKS, 1), memory_of(LAYERS, RANKS, 1)
    inventory = Inventory.kept(memory.placement)
    staging = Staging(store.backend, STAGING)
    for layer in inventory.layers:
        part = inventory.of_layer(layer)
        wanted = [BlockObject(f"{prefix}{layer.tag}", 4)]
        saver = BlockStore(store.backend, CacheBlocks(caches_of(memory), part), staging)
        assert saver.save(wanted)[0].ok
        for p in part.parts:
            fresh.rows(p.component)[4] = 0
        loader = BlockStore(store.backend, CacheBlocks(caches_of(fresh), part), staging)
        assert loader.load(wanted)[0].ok
    assert fresh.difference() == []


def test_a_commit_marker_is_an_object_without_payload(store: StoreUnderTest, prefix: str) -> None:
    marks = CommitMarks(store.backend, Staging(store.backend, 4096))
    assert [o.result for o in marks.save([f"{prefix}a", f"{prefix}b"])] == [StoreResult.STORED] * 2
    assert store.backend.exist([f"{prefix}a", f"{prefix}b"]) == [True, True]
    assert len(store.read(f"{prefix}a")) == HEADER_BYTES


def test_staging_bounds_what_is_in_it(store: StoreUnderTest) -> None:
    memory = memory_of(LAYERS, RANKS, 0)
    blocks = CacheBlocks(caches_of(memory), Inventory.kept(memory.placement))
    least = HEADER_BYTES + (blocks.inventory.payload_bytes if store.packed else 0)
    BlockStore(store.backend, blocks, Staging(store.backend, least))
    with pytest.raises(KvppError, match="raise staging_bytes"):
        BlockStore(store.backend, blocks, Staging(store.backend, least - 1))


def test_headers_of_the_longest_key_fit() -> None:
    key, inventory = "k" * 224, bytes([255]) * 8
    header = write_header(key, 2**63, inventory)
    assert len(header) == HEADER_BYTES
    assert read_header(header, key, 2**63, inventory) is None
    for damaged in range(header[0] + 1):
        broken = bytearray(header)
        broken[damaged] ^= 0x55
        assert read_header(bytes(broken), key, 2**63, inventory) is not None


@pytest.mark.parametrize("packed", [True, False])
def test_the_store_writes_headers_after_they_were_cleared_and_reads_them_after_they_were_written(
    tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On accelerators both are kernels of the thread's stream, which the store knows nothing of."""
    order: list[str] = []

    class Event:
        def synchronize(self) -> None:
            order.append("complete")

    class Watched(FaultyStore):
        def put(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
            order.append("put")
            return super().put(keys, buffers)

        def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
            order.append("get")
            return super().get(keys, buffers)

    for module in (block_objects, packing):
        monkeypatch.setattr(module, "record_event", lambda _: Event())
    opened = MemCacheStandInStore(tmp_path)
    store = Watched(opened.backend)
    store.packed = packed
    memory = memory_of(LAYERS, RANKS, 0)
    blocks = CacheBlocks(caches_of(memory), Inventory.kept(memory.placement))
    objects_ = BlockStore(store, blocks, Staging(store, STAGING))
    wanted = objects("header", [1])
    assert objects_.save(wanted)[0].ok
    assert order == ["complete", "put"]
    order.clear()
    assert objects_.load(wanted)[0].ok
    assert order[:2] == ["complete", "get"]
    order.clear()
    CommitMarks(store, Staging(store, STAGING)).save(["mark"])
    assert order == ["complete", "put"]
    opened.close()
