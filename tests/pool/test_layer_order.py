"""Layer by layer over a real Mooncake store: at every prefetch distance, and in which order.

One engine saves, a fresh one loads, for all tests. Field reports 5.2 and 5.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine import tiny_models
from tests.engine.harness import kvpp_off, kvpp_on
from tests.pool.master import wait_until
from tests.pool.pool_engine import MTP, PoolEngine, transfer
from tests.pool.sharing import LOADED, PROMPTS, assert_missed, run
from tests.pool.store_faults import EXTENSION, Gate
from tests.pool.store_process import StoreProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.smoke,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("patient_clients"),
]

BOUND_S = 120.0

TARGET = tiny_models.SHARED  # sparse: components of unlike sizes
DRAFTING: dict[str, Any] = {"speculative_config": MTP}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse model with a draft layer."""
    return tiny_models.write(tmp_path_factory.mktemp("pool") / "model", replace(TARGET, drafts=1))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What an engine without a pool answers."""
    return run(model, kvpp_off(), tp=1, **DRAFTING).tokens


@pytest.fixture(scope="module")
def layerwise(model: Path, expected: list[list[int]], pool: StoreProcess) -> Iterator[PoolEngine]:
    """A fresh engine with KVPP that loads layer by layer what another has saved so."""
    saved = run(model, kvpp_on(), layered(pool, 1), **DRAFTING)
    assert saved.tokens == expected
    assert_missed(saved)
    with start(model, layered(pool, 0)) as engine:
        yield engine


def layered(pool: StoreProcess, prefetch: int) -> dict[str, Any]:
    """A kv_transfer_config."""
    return transfer(pool.master.address, use_layerwise=True, layerwise_prefetch_layers=prefetch)


def start(model: Path, config: dict[str, Any]) -> PoolEngine:
    """An engine of two ranks with KVPP, which poisons scratch at each step."""
    return PoolEngine(
        model,
        model.parent / "engine.log",
        additional_config=kvpp_on(),
        worker_extension_cls=EXTENSION,
        kv_transfer_config=config,
        **DRAFTING,
    ).wait_ready()


def served(engine: PoolEngine) -> tuple[list[list[int]], int]:
    """Tokens of the prompts' answers and prompt tokens that were not computed."""
    answers = engine.run(PROMPTS)
    return [a["tokens"] for a in answers], sum(a["cached"] for a in answers)


@pytest.mark.parametrize("prefetch", [0, 1, 3, TARGET.layers + 1])
def test_layer_by_layer(layerwise: PoolEngine, expected: list[list[int]], prefetch: int) -> None:
    layerwise.call_all("fault_prefetch", prefetch)
    assert served(layerwise) == (expected, LOADED)


@pytest.mark.parametrize("layer", [1, TARGET.layers - 2], ids=["of rank 0", "of rank 1"])
def test_a_layer_is_broadcast_after_its_load_and_attention_waits(
    layerwise: PoolEngine, expected: list[list[int]], tmp_path: Path, layer: int
) -> None:
    """Properties S4 and S5. The owner's load of one layer stands still: both ranks come as far as
    this layer, and it is neither sent nor read before the gate is open. Then the answer is right.
    """
    gate = Gate(tmp_path)
    layerwise.call_all("fault_prefetch", 1)
    layerwise.call_all("fault_hold_layer", tmp_path, layer)
    layerwise.ask("reset")
    layerwise.tell("run", prompts=[PROMPTS[0]])
    wait_until(lambda: len(gate.of(layer, "wanted")) == 2, BOUND_S, "both ranks want the layer")
    seen = {event.what for event in gate.of(layer)}
    assert {"held", "wanted"} <= seen <= {"held", "wanted", "awaited"}
    gate.open()
    [answer] = layerwise.answer()
    layerwise.call_all("fault_release_store")
    assert (answer["tokens"], answer["cached"]) == (expected[0], 96)
    order = list(dict.fromkeys(event.what for event in gate.of(layer)))
    assert order.index("loaded") < order.index("sent") < order.index("readable")
