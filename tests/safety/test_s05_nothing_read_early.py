"""S5: no component is read before it is ready: main caches, indexers, scales, drafts.

Broadcasts: two gloo ranks over streams that really run late; rank 0 keeps layers 0..3, rank 1
layers 4..7; layer 0 has a main cache, an indexer and its scales. Its twin takes the ordering away
and must see wrong bytes. Loads: layers of a pool that come late. Field report 5.3.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from kvpp_core.bundles import LayerBundle
from kvpp_core.policy import BroadcastPolicy
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rank_memory import RankMemory, uneven_model
from tests.core.rig import (
    ACTIVE,
    CONTROLLED,
    MODES,
    PATIENCE,
    ControlledKind,
    assert_right,
    assert_wrong,
    controlled,
    rig,
)

if TYPE_CHECKING:
    from tests.safety.faulty_store import Fault

COMPONENTS = ("main", "indexer", "scale")  # of layer 0, in order
EARLY = 0.2  # seconds in which a start that must wait is given the chance to return


def late_transfer(
    rank: Rank, kind: ControlledKind, policy: BroadcastPolicy, first: int, broken: bool
) -> list[str]:
    """Rank 1 receives layer 0 so late that its read has been submitted.

    ``first`` is the component that is touched first.
    """
    device = controlled(kind, break_wait_transfer=broken and rank.rank == 1)
    with rig(rank, device, policy=policy) as r:
        late = device.hold("transfer", "broadcast of layer 0") if rank.rank == 1 else None
        r.pipeline.begin(ACTIVE)
        for component in (first, 0, 1, 2):
            r.pipeline.acquire(r.component(0, component))
        r.read(0, generation=1)
        if late is not None:
            device.settle()
            late.open()
        r.forward(1, 1)
        r.pipeline.end()
        return r.complaints()


@pytest.mark.parametrize("first", COMPONENTS)
@pytest.mark.parametrize("policy", MODES)
@pytest.mark.parametrize("kind", CONTROLLED)
def test_a_layer_is_not_read_before_its_late_broadcast_has_ended(
    world2: GlooWorld, kind: ControlledKind, policy: BroadcastPolicy, first: str
) -> None:
    results = world2.run(late_transfer, kind, policy, COMPONENTS.index(first), broken=False)
    assert_right(results)


@pytest.mark.parametrize("first", COMPONENTS)
@pytest.mark.parametrize("kind", CONTROLLED)
def test_twin_without_waiting_for_the_transfer_a_layer_is_read_too_early(
    world2: GlooWorld, kind: ControlledKind, first: str
) -> None:
    number = COMPONENTS.index(first)
    results = world2.run(late_transfer, kind, BroadcastPolicy.FULL, number, broken=True)
    for component in ("attn", "indexer.k_cache", "indexer.scale"):
        assert_wrong(results, f"layers.0.{component} ")


def components_of(memory: RankMemory, *bundles: LayerBundle) -> list[torch.Tensor]:
    """The active blocks of all components."""
    index = torch.tensor(ACTIVE)
    return [memory.rows(c).index_select(0, index) for b in bundles for c in b.components]


def assert_waits(start: Callable[[], None], held: Fault, loaded: Callable[[], bool]) -> None:
    """``start`` returns after the load that is held, and with all bytes there."""
    with ThreadPoolExecutor(1) as thread:
        started = thread.submit(start)
        try:
            assert held.reached.wait(PATIENCE)
            with pytest.raises(TimeoutError):
                started.result(EARLY)
            assert not loaded()
        finally:
            held.open()
        started.result(PATIENCE)
        assert loaded()


def test_a_step_starts_when_its_draft_layers_are_loaded() -> None:
    """No broadcast waits for a draft: the step does."""
    from tests.safety.layer_pool import NAMESPACE, job_of, layer_pool

    memory = RankMemory(uneven_model(3).placement(2, 0), 6)
    memory.store_owned(1)
    memory.store_drafts(1)
    job = job_of(ACTIVE)
    with layer_pool(memory) as pool:
        pool.save(job)
        wanted = components_of(memory, *memory.placement.drafts)
        memory.store_drafts(2)
        held = pool.store.inject("hold", "get", pool.part(3, draft=True))
        assert_waits(
            lambda: pool.loads.start(NAMESPACE, [job]),
            held,
            lambda: all(map(torch.equal, components_of(memory, *memory.placement.drafts), wanted)),
        )


@pytest.mark.parametrize("layer", [0, 3, 6])
def test_without_kvpp_a_step_starts_when_every_layer_is_loaded(layer: int, tmp_path: Path) -> None:
    """No broadcast waits for any of them. Every cache is a layer of its own here."""
    from kvpp_connectors.pool.messages import PoolStep
    from tests.pool.stores import MemCacheStandInStore
    from tests.safety.faulty_store import FaultyStore
    from tests.safety.layer_pool import NAMESPACE, job_of
    from tests.safety.pool_worker import pool_worker

    memory = RankMemory(uneven_model(3).placement(1, 0), 6)
    memory.store_owned(1)
    memory.store_drafts(1)
    caches = (*memory.placement.bundles, *memory.placement.drafts)
    store, job = FaultyStore(MemCacheStandInStore(tmp_path).backend), job_of(ACTIVE)
    with pool_worker(store, memory, kvpp=False, use_layerwise=True) as worker:
        worker.start(PoolStep(NAMESPACE, saves=[job]))
        worker.release([job.life])
        wanted = components_of(memory, *caches)
        memory.store_owned(2)
        memory.store_drafts(2)
        held = store.inject("hold", "get", f"@t{layer}")
        assert_waits(
            lambda: worker.start(PoolStep(NAMESPACE, loads=[job])),
            held,
            lambda: all(map(torch.equal, components_of(memory, *caches), wanted)),
        )
        assert worker.take_invalid_blocks() == set()
