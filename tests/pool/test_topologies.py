"""Engines of every topology over one real Mooncake store: each finds its own objects.

Properties S6 (a hit needs every shard and stage) and S11. Field reports 3.3 and 3.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engine import tiny_models
from tests.engine.harness import kvpp_off, kvpp_on
from tests.pool.pool_engine import transfer
from tests.pool.sharing import LOADED, WAYS, assert_missed, run
from tests.pool.store_process import StoreProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("patient_clients"),
]

Served = tuple[Path, list[list[int]]]

# Layers and the engine's ranks. In all but the first a rank owns nothing.
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "two stages of two ranks": (6, {"tp": 2, "pipeline_parallel_size": 2}),
    "two stages of two ranks, one rank owns nothing": (3, {"tp": 2, "pipeline_parallel_size": 2}),
    "four ranks, one owns nothing": (3, {"tp": 4}),
    "two ranks, one owns nothing": (1, {"tp": 2}),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Served]:
    """By number of layers: a model, and what an engine of one rank without a pool answers."""

    @cache
    def serve(layers: int) -> Served:
        folder = tmp_path_factory.mktemp("topologies") / "model"
        model = tiny_models.write(folder, replace(tiny_models.MLA, layers=layers))
        return model, run(model, kvpp_off(), tp=1).tokens

    return serve


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_what_one_engine_saves_another_of_its_topology_loads(
    served: Callable[[int], Served], pool: StoreProcess, topology: str, way: str
) -> None:
    layers, ranks = TOPOLOGIES[topology]
    model, expected = served(layers)
    config = transfer(pool.master.address, model_id=f"{topology} {way}", **WAYS[way])
    first = run(model, kvpp_on(), config, **ranks)
    assert first.tokens == expected
    assert_missed(first)
    second = run(model, kvpp_on(), config, **ranks)
    assert (second.tokens, second.cached) == (expected, LOADED)


# What decides the bytes or who keeps them, each changed alone.
UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "four ranks": (kvpp_on(), {"tp": 4}),
    "two stages": (kvpp_on(), {"pipeline_parallel_size": 2}),
    "without KVPP": (kvpp_off(), {}),
    "dtype": (kvpp_on(), {"dtype": "bfloat16"}),
    "hash": (kvpp_on(), {"prefix_caching_hash_algo": "sha256_cbor"}),
}


def test_unlike_engines_miss_each_others_objects(tmp_path: Path, pool: StoreProcess) -> None:
    """Nothing else distinguishes them: one folder of weights, one pool, no `model_id`.

    The first finds its objects after all others have saved theirs.
    """
    model = tiny_models.write(tmp_path / "model", tiny_models.MLA)
    config = transfer(pool.master.address)
    first = run(model, kvpp_on(), config)
    assert_missed(first)
    for kvpp, options in UNLIKE.values():
        ran = run(model, kvpp, config, **options)
        assert_missed(ran)
        assert options.get("dtype") or ran.tokens == first.tokens
    again = run(model, kvpp_on(), config)
    assert (again.tokens, again.cached) == (first.tokens, LOADED)


def test_models_with_one_basename_do_not_collide(tmp_path: Path, pool: StoreProcess) -> None:
    """Other weights in a folder of the same name, and other weights in the same folder later."""
    config = transfer(pool.master.address)
    folders = [tmp_path / name / "model" for name in ("a", "b")]
    for seed, folder in enumerate(folders, 10):
        tiny_models.write(folder, tiny_models.MLA, seed=seed)
        assert_missed(run(folder, kvpp_on(), config))
    tiny_models.write(folders[0], tiny_models.MLA, seed=12)
    replaced = run(folders[0], kvpp_on(), config)
    assert_missed(replaced)
    assert replaced.tokens == run(folders[0], kvpp_off()).tokens
