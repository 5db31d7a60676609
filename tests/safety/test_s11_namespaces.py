"""S11: unlike namespaces never share an object.

Whatever decides bytes or their split over ranks is part of every key; two engines that differ save
blocks of the same hashes into every store that can run here, at the same time, and each gets its
own. What lies under a key and is not what the key promises is never loaded. Injected: objects that
are another key's, cut, lengthened, damaged, of other layers or another version; puts that come
twice or in another order. Field reports 3.3, 3.5, 4.2.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from kvpp_connectors.pool.block_objects import HEADER_BYTES, BlockStore, Staging, write_header
from kvpp_connectors.pool.keys import Namespace
from kvpp_connectors.pool.packing import CacheBlocks, Inventory
from kvpp_connectors.pool.store.base import StoreResult
from tests.core.rank_memory import uneven_model
from tests.pool.block_stores import LAYERS, RANKS, objects, opened
from tests.pool.stores import StoreUnderTest
from tests.pool.test_keys import (
    BASE,
    KVPP,
    OTHER_FINGERPRINTS,
    OTHER_TOPOLOGIES,
    every_key,
)
from tests.pool.test_packing import caches_of, memory_of
from tests.safety.faulty_store import FaultyStore, What
from tests.safety.layer_pool import STAGING, job_of

OTHERS = {
    **{what: Namespace(other, KVPP) for what, other in OTHER_FINGERPRINTS.items()},
    **{what: Namespace(BASE, other) for what, other in OTHER_TOPOLOGIES.items()},
}


@pytest.mark.parametrize("changed", OTHERS)
def test_engines_of_unlike_bytes_have_no_key_in_common(changed: str) -> None:
    """Of blocks, layers and marks; and no prefix is the beginning of another."""
    ours, theirs = Namespace(BASE, KVPP), OTHERS[changed]
    assert not set(every_key(ours)) & set(every_key(theirs))
    assert not theirs.prefix.startswith(ours.prefix)


class Engine:
    """One rank of an engine, and its blocks in a store that others share."""

    def __init__(
        self, store: StoreUnderTest, space: Namespace, generation: int, what: What | None
    ) -> None:
        self.memory = memory_of(LAYERS, RANKS, 0)
        for ordinal in self.memory.placement.owned:
            self.memory.store(ordinal, generation)
        faulty = FaultyStore(store.backend)
        if what is not None:
            faulty.inject(what, "put")
        blocks = CacheBlocks(caches_of(self.memory), Inventory.kept(self.memory.placement))
        self.blocks = BlockStore(faulty, blocks, Staging(faulty, STAGING))
        shard = space.topology.shards[0]
        self.wanted = job_of(range(6)).objects(lambda found: space.block_key(found, shard))


@pytest.mark.parametrize("what", [None, "twice", "reverse"])
@pytest.mark.parametrize("changed", ["weights under the same name", "hash seed", "group size"])
def test_engines_that_save_the_same_hashes_at_once_get_their_own_bytes_back(
    store: StoreUnderTest, prefix: str, changed: str, what: What | None
) -> None:
    """Neither finds anything of the other; a loader of each finds all of its own."""
    engines = []
    for generation, space in enumerate((Namespace(BASE, KVPP), OTHERS[changed]), start=1):
        here = replace(space.fingerprint, revision=prefix)  # of this test
        engines.append(Engine(store, Namespace(here, space.topology), generation, what))
    for engine in engines:
        assert not any(store.backend.exist([o.key for o in engine.wanted]))
    with ThreadPoolExecutor(2) as threads:
        saves = [threads.submit(engine.blocks.save, engine.wanted) for engine in engines]
        assert all(outcome.ok for save in saves for outcome in save.result())
    for engine in engines:
        memory = engine.memory
        was = memory.buffer.clone()
        for ordinal in memory.placement.owned:
            memory.store(ordinal, generation=3)
        assert all(outcome.ok for outcome in engine.blocks.load(engine.wanted))
        assert torch.equal(memory.buffer, was)


@pytest.mark.parametrize(
    ("change", "result", "says"),
    [
        ("shorter", StoreResult.WRONG_LENGTH, "code"),
        ("longer", StoreResult.WRONG_LENGTH, "code"),
        ("another key's", StoreResult.FOREIGN, "another key"),
        ("no header", StoreResult.FOREIGN, "header"),
        ("zeros", StoreResult.FOREIGN, "header"),
        ("other layers", StoreResult.FOREIGN, "other layers or components"),
        ("other version", StoreResult.FOREIGN, "of format"),
    ],
)
def test_a_foreign_object_is_never_loaded(
    store: StoreUnderTest, prefix: str, change: str, result: StoreResult, says: str
) -> None:
    memory = memory_of(LAYERS, RANKS, 0)
    opened(store, memory).save(objects(prefix, [0, 1]))
    key = f"{prefix}0"
    good = store.read(key)
    payload = len(good) - HEADER_BYTES
    other = Inventory.kept(uneven_model(4).placement(1, 0)).digest()
    mine = Inventory.kept(memory.placement).digest()
    header = write_header(key, payload, mine)
    changed = {
        "shorter": good[:-1],
        "longer": good + b"\0",
        "another key's": store.read(f"{prefix}1"),
        "no header": good[HEADER_BYTES:] + header,
        "zeros": bytes(len(good)),
        "other layers": write_header(key, payload, other) + good[HEADER_BYTES:],
        "other version": header.replace(b"\xa4kvpp\x01", b"\xa4kvpp\x02") + good[HEADER_BYTES:],
    }[change]
    assert changed != good
    store.replace(key, changed)
    (outcome,) = opened(store, memory).load(objects(prefix, [0]))
    assert outcome.result is result and says in str(outcome), outcome
    if store.packed:
        assert memory.difference() == []  # not even touched
