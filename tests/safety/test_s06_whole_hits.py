"""S6: a hit needs every shard, stage and component.

Two pipeline stages of two ranks under KVPP save blocks into every store that can run here; one of
the four ranks keeps nothing. Then one object is gone, or was never saved. Injected: eviction of
each object, puts that fail, that the store loses and says it has, that come twice or in another
order. Field reports 3.3, 3.4, 4.1, 5.3.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpp_connectors.pool.block_objects import BlockObject, BlockStore, Staging
from kvpp_connectors.pool.keys import LayerId, Namespace, Shard, Topology
from kvpp_connectors.pool.lookup import Lookup
from kvpp_connectors.pool.modes.layerwise import LayerStores
from kvpp_connectors.pool.packing import CacheBlocks, Inventory
from kvpp_connectors.pool.stats import PoolStats
from kvpp_core.manifest import Manifest
from kvpp_core.ownership import assign_owners
from tests.core.rank_memory import Model, RankMemory, uneven_model
from tests.pool.stores import StoreUnderTest
from tests.pool.test_keys import BASE
from tests.pool.test_packing import caches_of
from tests.safety.faulty_store import FaultyStore, What
from tests.safety.layer_pool import STAGING, job_of, share_of

RANKS = 2
STAGES = (Model(uneven_model(1).bundles), uneven_model(3))  # drafts are on the last stage
KEPT = {
    Shard(0, 0): (LayerId(False, 0),),
    Shard(1, 0): (LayerId(False, 0), LayerId(False, 1), LayerId(True, 3)),
    Shard(1, 1): (LayerId(False, 2), LayerId(True, 3)),
}
LAYERS = [(shard, layer) for shard, layers in KEPT.items() for layer in layers]
JOB = job_of([4, 0, 5, 2])
LOST = 2  # position of the block that something happens to
WAIT_S = 20.0


class Engine:
    """All ranks of both stages, and the scheduler's lookups."""

    def __init__(self, store: StoreUnderTest, revision: str, layerwise: bool) -> None:
        self._layerwise = layerwise
        self.store = FaultyStore(store.backend)
        manifests = [
            Manifest(RANKS, 4, "fp8", stage.bundles, assign_owners(stage.bundles, RANKS))
            for stage in STAGES
        ]
        topology = Topology.kvpp(manifests, stages_with_drafts=[1])
        self.namespace = Namespace(replace(BASE, revision=revision), topology)
        self.memories = {
            shard: RankMemory(STAGES[shard.stage].placement(RANKS, shard.owner), 6)
            for shard in KEPT
        }
        for memory in self.memories.values():
            memory.store_owned(1)
            memory.store_drafts(1)

    def save(self) -> None:
        """Every rank saves its share of JOB."""
        for shard, memory in self.memories.items():
            if self._layerwise:
                self._layers(shard).save(self.namespace, JOB)
            else:
                self._blocks(memory).save(self._objects(shard))

    def hit(self) -> int:
        """Blocks that the scheduler would load."""
        lookup = Lookup(self.store.exist, PoolStats("test"), WAIT_S)
        keys = [self.namespace.required_keys(found, self._layerwise) for found in JOB.hashes]
        hit = lookup.ask("r", None, keys, WAIT_S).hit
        lookup.close()
        assert hit is not None
        return hit.blocks

    def load(self) -> list[bool]:
        """Whether each block came, on all ranks and in all layers, with its bytes."""
        good = [True] * len(JOB.blocks)
        for shard, memory in self.memories.items():
            before = memory.buffer.clone()
            memory.store_owned(2)
            memory.store_drafts(2)
            outcomes = [
                self._layers(shard).load(self.namespace, layer, [JOB])
                for layer in (KEPT[shard] if self._layerwise else ())
            ] or [self._blocks(memory).load(self._objects(shard))]
            for position, block in enumerate(JOB.blocks):
                came = all(of_layer[position].ok for of_layer in outcomes)
                good[position] &= came
                for part in Inventory.kept(memory.placement).parts if came else ():
                    span = memory.layout.components[part.component.name]
                    was = before[span.offset : span.end].view(6, -1)[block]
                    assert torch.equal(memory.rows(part.component)[block], was)
        return good

    def key(self, block_hash: bytes, shard: Shard) -> str:
        """Of what must exist for a shard's share of a block."""
        key = self.namespace.commit_key if self._layerwise else self.namespace.block_key
        return key(block_hash, shard)

    def _layers(self, shard: Shard) -> LayerStores:
        return LayerStores(replace(share_of(self.store, self.memories[shard]), shard=shard))

    def _objects(self, shard: Shard) -> list[BlockObject]:
        return JOB.objects(lambda found: self.key(found, shard))

    def _blocks(self, memory: RankMemory) -> BlockStore:
        blocks = CacheBlocks(caches_of(memory), Inventory.kept(memory.placement))
        return BlockStore(self.store, blocks, Staging(self.store, STAGING))


@pytest.mark.parametrize("what", [None, "twice", "reverse"])
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole blocks", "layer by layer"])
def test_what_every_rank_has_saved_is_hit_and_comes_back(
    store: StoreUnderTest, prefix: str, layerwise: bool, what: What | None
) -> None:
    """The rank that keeps nothing is not waited for."""
    engine = Engine(store, prefix, layerwise)
    assert engine.namespace.topology.shards == tuple(KEPT)
    if what is not None:
        engine.store.inject(what, "put")
    engine.save()
    assert engine.hit() == 4
    assert engine.load() == [True] * 4


@pytest.mark.parametrize("shard", KEPT, ids=lambda shard: shard.tag)
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole blocks", "layer by layer"])
def test_a_block_of_which_any_shard_is_gone_ends_the_hit(
    store: StoreUnderTest, prefix: str, layerwise: bool, shard: Shard
) -> None:
    engine = Engine(store, prefix, layerwise)
    engine.save()
    store.remove(engine.key(JOB.hashes[LOST], shard))
    assert engine.hit() == LOST


@pytest.mark.parametrize(("shard", "layer"), LAYERS, ids=lambda part: part.tag)
def test_a_block_of_which_any_layer_was_not_saved_ends_the_hit(
    store: StoreUnderTest, prefix: str, shard: Shard, layer: LayerId
) -> None:
    """Its rank leaves no mark on it; drafts count like the others."""
    engine = Engine(store, prefix, layerwise=True)
    key = engine.namespace.layer_key(JOB.hashes[LOST], shard, layer)
    engine.store.inject("fail", "put", key)
    engine.save()
    assert engine.hit() == LOST


@pytest.mark.parametrize(("shard", "layer"), LAYERS, ids=lambda part: part.tag)
def test_a_layer_that_the_store_has_lost_is_a_block_that_did_not_come(
    store: StoreUnderTest, prefix: str, shard: Shard, layer: LayerId
) -> None:
    """4.1: a hit may be too long when a store lies; the load tells, block by block."""
    engine = Engine(store, prefix, layerwise=True)
    key = engine.namespace.layer_key(JOB.hashes[LOST], shard, layer)
    engine.store.inject("drop", "put", key)
    engine.save()
    engine.store.heal()
    assert engine.hit() == 4
    assert engine.load() == [True, True, False, True]
