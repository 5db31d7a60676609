"""Real engines over a real Mooncake store: what one saves another loads, to the same tokens.

The store's memory is in a process of its own, so that it outlives the engines.
Layer by layer: test_layer_order.py. What breaks while they run: test_engine_faults.py. Engines of
unlike topologies and models: test_topologies.py.
Field reports 3.3, 4.1, 4.2, 4.4, 4.5, 5.2 (draft caches are saved, too) and 5.3.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine import tiny_models
from tests.engine.harness import kvpp_off, kvpp_on
from tests.pool import sharing
from tests.pool.master import Master
from tests.pool.pool_engine import MTP, transfer
from tests.pool.sharing import LOADED, WAYS, Ran, assert_missed
from tests.pool.store_process import StoreProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("patient_clients"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse model with a draft layer: three components of unlike sizes."""
    folder = tmp_path_factory.mktemp("pool") / "model"
    return tiny_models.write(folder, replace(tiny_models.SHARED, drafts=1))


def run(model: Path, kvpp: dict[str, Any], pool: dict[str, Any] | None = None, tp: int = 2) -> Ran:
    """What came of the prompts in an engine of its own, which drafts."""
    return sharing.run(model, kvpp, pool, tp=tp, speculative_config=MTP)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What an engine without a pool answers."""
    return run(model, kvpp_off()).tokens


@pytest.fixture(scope="module")
def saved(model: Path, expected: list[list[int]], pool: StoreProcess) -> StoreProcess:
    """A pool with what an engine with KVPP has saved as ``kvpp``."""
    first = run(model, kvpp_on(), transfer(pool.master.address, model_id="kvpp"))
    assert first.tokens == expected
    assert_missed(first)
    return pool


@pytest.mark.parametrize("load_async", [False, True], ids=["in the step", "between steps"])
def test_what_one_kvpp_engine_saves_another_loads(
    model: Path, expected: list[list[int]], saved: StoreProcess, load_async: bool
) -> None:
    config = transfer(saved.master.address, load_async=load_async, model_id="kvpp")
    second = run(model, kvpp_on(), config)
    assert (second.tokens, second.cached) == (expected, LOADED)


@pytest.mark.parametrize("way", WAYS)
def test_a_lost_store_costs_time_only(model: Path, expected: list[list[int]], way: str) -> None:
    """Properties S4 and S6. The master still lists what the dead store held: every load fails.

    The blocks are invalid on every rank, and are computed; nothing that was computed from them is
    saved: a third engine, with another store, has only good objects to load.
    """
    master = Master()
    store = StoreProcess(master, "512MB")
    try:
        config = transfer(master.address, model_id=way, **WAYS[way])
        assert run(model, kvpp_on(), config).tokens == expected
        store.stop()
        store = StoreProcess(master, "256MB")
        assert run(model, kvpp_on(), config).tokens == expected
        assert run(model, kvpp_on(), config).tokens == expected
    finally:
        store.stop()
        master.stop()


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole blocks", "layer by layer"])
def test_engines_without_kvpp_share_over_their_ranks_and_never_with_kvpp(
    model: Path, expected: list[list[int]], pool: StoreProcess, layerwise: bool
) -> None:
    """Property S11, field report 3.3. Two ranks that keep the same bytes share the saving; one rank
    loads it all. An engine with KVPP finds nothing of it, and they nothing of what it saves.
    """
    config = transfer(
        pool.master.address, use_layerwise=layerwise, model_id=f"replicated {layerwise}"
    )
    for kvpp, tp, hits in (
        (kvpp_off(), 2, 0),
        (kvpp_on(), 2, 0),
        (kvpp_off(), 1, LOADED),
        (kvpp_on(), 2, LOADED),
    ):
        ran = run(model, kvpp, config, tp)
        assert (ran.tokens, ran.cached) == (expected, hits)
