"""Real engines over a real Mooncake store: what one saves another loads, to the same tokens.

The store's memory is in a process of its own, so that it outlives the engines.
Layer by layer: test_layer_order.py. What breaks while they run: test_engine_faults.py.
Field reports 3.3, 4.1, 4.2, 4.4, 4.5, 5.2 (draft caches are saved, too) and 5.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine import tiny_models
from tests.engine.harness import (
    Answer,
    Request,
    Script,
    kvpp_off,
    kvpp_on,
    random_tokens,
    start_engine,
)
from tests.fork_server import call_apart
from tests.pool.master import Master
from tests.pool.store_process import StoreProcess, lent_pool

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("patient_clients"),
]

LENGTHS = (100, 64, 200, 30)
BLOCK = 16
PROMPTS = [random_tokens(seed, length) for seed, length in enumerate(LENGTHS)]
SCRIPT = Script(tuple(Request(prompt, max_tokens=8) for prompt in PROMPTS))
WHOLE = sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
# A prompt of whole blocks is loaded but for its last token.
LOADED = sum(min(length // BLOCK * BLOCK, length - 1) for length in LENGTHS)


@pytest.fixture(scope="module")
def pool() -> Iterator[StoreProcess]:
    """A master and a store that hold what engines save."""
    with lent_pool() as store:
        yield store


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse model with a draft layer: three components of unlike sizes."""
    folder = tmp_path_factory.mktemp("pool") / "model"
    return tiny_models.write(folder, replace(tiny_models.SHARED, drafts=1))


def transfer(pool: StoreProcess, **extra: Any) -> dict[str, Any]:
    """A kv_transfer_config of our connector. The lookup may take its time on a busy machine."""
    settings = {"master_server_address": pool.master.address, "global_segment_size": 0}
    return {
        "kv_connector": "AscendStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "mooncake": settings,
            "lookup_deadline_s": 30.0,
            "lookup_wait_s": 1.0,
            **extra,
        },
    }


def run(
    model: Path, config: dict[str, Any], transfer_config: dict[str, Any] | None, tp: int = 2
) -> list[Answer]:
    """The script's answers in an engine and a process of its own."""
    return call_apart(answer, model, config, transfer_config, tp)


def answer(
    model: Path, config: dict[str, Any], transfer_config: dict[str, Any] | None, tp: int
) -> list[Answer]:
    """The script's answers in an engine of its own, which has saved all that it is to save."""
    options: dict[str, Any] = {"speculative_config": MTP}
    if transfer_config is not None:
        options["kv_transfer_config"] = transfer_config
    with start_engine(model, config, tp=tp, **options) as engine:
        answers = engine.run(SCRIPT).answers
        if transfer_config is not None:
            engine.drain()
        return answers


MTP = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What an engine without a pool answers."""
    return tokens(run(model, kvpp_off(), None))


def tokens(answers: list[Answer]) -> list[list[int]]:
    """The tokens alone: logprobs may differ in the last bit with how a prompt is cut."""
    return [answer.tokens for answer in answers]


def cached(answers: list[Answer]) -> int:
    """Prompt tokens that were not computed."""
    return sum(answer.cached_tokens for answer in answers)


@pytest.mark.parametrize("load_async", [False, True], ids=["in the step", "between steps"])
def test_what_one_kvpp_engine_saves_another_loads(
    model: Path, expected: list[list[int]], pool: StoreProcess, load_async: bool
) -> None:
    config = transfer(pool, load_async=load_async, model_id=f"kvpp-{load_async}")
    first = run(model, kvpp_on(), config)
    assert (tokens(first), cached(first)) == (expected, 0)
    second = run(model, kvpp_on(), config)
    assert (tokens(second), cached(second)) == (expected, LOADED)


WAYS: dict[str, dict[str, Any]] = {
    "before the step": {},
    "between steps": {"load_async": True},
    "layer by layer": {"use_layerwise": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_lost_store_costs_time_only(model: Path, expected: list[list[int]], way: str) -> None:
    """Properties S4 and S6. The master still lists what the dead store held: every load fails.

    The blocks are invalid on every rank, and are computed; nothing that was computed from them is
    saved: a third engine, with another store, has only good objects to load.
    """
    master = Master()
    store = StoreProcess(master, "512MB")
    try:
        config = transfer(store, model_id=way, **WAYS[way])
        assert tokens(run(model, kvpp_on(), config)) == expected
        store.stop()
        store = StoreProcess(master, "256MB")
        assert tokens(run(model, kvpp_on(), config)) == expected
        assert tokens(run(model, kvpp_on(), config)) == expected
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
    config = transfer(pool, use_layerwise=layerwise, model_id=f"replicated {layerwise}")
    for kvpp, tp, hits in (
        (kvpp_off(), 2, 0),
        (kvpp_on(), 2, 0),
        (kvpp_off(), 1, LOADED),
        (kvpp_on(), 2, LOADED),
    ):
        answers = run(model, kvpp, config, tp)
        assert (tokens(answers), cached(answers)) == (expected, hits)
