"""Real engines of vLLM 0.23 under the adapter of vllm-ascend: equal answers, P/D, a pool.

Of the hardware there is a stand-in (reference.py). Two ranks, gloo, Mooncake over tcp.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpp_connectors.demo.model import TinyModel, write_checkpoint
from tests.pool.master import Master
from tests.v023.engine import Engine

pytestmark = pytest.mark.vllm023

LAYERS, RANKS, BLOCK = 6, 2, 128
BYTES_PER_TOKEN = (512 + 64) * 4  # of one layer
ON: dict[str, Any] = {"enable_kvpp": True, "kvpp": {"poison_scratch": True}}
OFF: dict[str, Any] = {"kvpp": {"cpu_profile": True}}
REFERENCE = "tests.v023.reference.ReferenceWorker"
LATE = {"REFERENCE_IS_LATE": "1"}
MEMORY = 64 << 20  # bytes per rank
EXTRA = "kv_connector_extra_config"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose answers depend on every byte of its cache."""
    return write_checkpoint(tmp_path_factory.mktemp("v023"), TinyModel(num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Long ones that are computed in chunks, and short ones."""
    chosen = random.Random(23)
    return [[chosen.randrange(5, 500) for _ in range(length)] for length in (300, 40, 200)]


def start(model: Path, log: Path, additional: dict[str, Any], **options: Any) -> Engine:
    """An engine of two ranks."""
    settings: dict[str, Any] = {
        "tensor_parallel_size": RANKS,
        "kv_cache_memory_bytes": MEMORY,
        "additional_config": additional,
        **({} if additional is ON else {"worker_cls": REFERENCE}),
        **options,
    }
    return Engine(model, log, **settings)


def transfer(role: str, port: int) -> dict[str, Any]:
    """Prefill's or decode's side of a transfer."""
    return {"kv_connector": "MooncakeConnectorV2", "kv_role": role, "kv_port": port, EXTRA: {}}


def pooled(master: Master, layerwise: bool) -> dict[str, Any]:
    """A pool that keeps what its engines lend: 64 MiB each."""
    return {
        "kv_connector": "AscendStoreConnector",
        "kv_role": "kv_both",
        EXTRA: {
            "backend": "mooncake",
            "mooncake": {
                "master_server_address": master.address,
                "global_segment_size": 64 << 20,
            },
            "lookup_deadline_s": 30.0,
            "lookup_wait_s": 1.0,
            "use_layerwise": layerwise,
            "load_async": not layerwise,
        },
    }


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """The same tokens, and their probabilities to rounding."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["tokens"] == other["tokens"]
        assert mine["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)


@pytest.fixture(scope="module")
def expected(
    model: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], int]:
    """The answers without KVPP, and the blocks that fit."""
    with start(model, tmp_path_factory.mktemp("off") / "log", OFF) as engine:
        return engine.generate(prompts, 8), engine.facts()["blocks"]


def test_kvpp_answers_as_without_it_in_more_blocks(
    model: Path,
    prompts: list[list[int]],
    expected: tuple[list[dict[str, Any]], int],
    tmp_path: Path,
) -> None:
    """Chunked prefill, decode, and a second wave from cached prefixes; scratch is poisoned."""
    answers, blocks = expected
    with start(model, tmp_path / "log", ON) as engine:
        facts, layouts = engine.facts(), engine.call("kvpp_layout")
        same(engine.generate(prompts, 8), answers)
        again = engine.generate(prompts, 8)
        same(again, answers)
        (stats, _) = engine.call("kvpp_stats")
    assert [answer["cached"] for answer in again] == [256, 0, 128]
    assert facts["block_size"] == BLOCK
    assert facts["worker"] == "tests.v023.reference.KvppReferenceWorker"
    # Three owned layers and two slots instead of six layers, less what alignment takes.
    assert blocks * 1.1 < facts["blocks"] <= blocks * 6 / 5 + 1
    assert [layout["owned_layers"] for layout in layouts] == [[0, 1, 2], [3, 4, 5]]
    assert all(layout["allocated_bytes"] <= MEMORY for layout in layouts)
    assert stats["bytes_total"] > 0 and stats["aborted_steps"] == 0


def test_layers_that_wait_too_late_answer_wrongly(
    model: Path,
    prompts: list[list[int]],
    expected: tuple[list[dict[str, Any]], int],
    tmp_path: Path,
) -> None:
    """After their attention, not before the first touch: the test above can fail."""
    with start(model, tmp_path / "log", ON, environment=LATE) as engine:
        found = engine.generate(prompts, 8)
    assert [answer["tokens"] for answer in found] != [answer["tokens"] for answer in expected[0]]


def test_decode_pulls_from_a_kvpp_prefill(
    model: Path,
    prompts: list[list[int]],
    expected: tuple[list[dict[str, Any]], int],
    tmp_path: Path,
    ports: Callable[[int], Sequence[int]],
) -> None:
    """Every rank of decode pulls every tensor of each layer from its owner."""
    prefill = transfer("kv_producer", ports(RANKS)[0])
    decode = transfer("kv_consumer", ports(RANKS)[0])
    with (
        start(model, tmp_path / "prefill", ON, kv_transfer_config=prefill) as producer,
        start(model, tmp_path / "decode", OFF, kv_transfer_config=decode) as consumer,
    ):
        for prompt, answer in zip(prompts, expected[0], strict=True):
            (first,) = producer.generate([prompt], 1, {"do_remote_decode": True})
            assert first["params"]["do_remote_prefill"] is True
            (found,) = consumer.generate([prompt], 8, first["params"])
            same([found], [answer])
        pulls = [line for line in consumer.log().splitlines() if "pulled" in line]
    assert len(pulls) == RANKS * len(prompts)
    for prompt in prompts:
        size = -(-len(prompt) // BLOCK) * BLOCK * LAYERS * BYTES_PER_TOKEN
        assert sum(f"pulled {size:,} bytes" in line for line in pulls) == RANKS


@pytest.fixture(params=[False, True], ids=["whole blocks", "layer by layer"])
def pool(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The transfer configuration of a pool whose master runs for the test."""
    master = Master()
    yield pooled(master, request.param)
    master.stop()


def test_a_pool_serves_the_next_kvpp_engine(
    model: Path,
    prompts: list[list[int]],
    expected: tuple[list[dict[str, Any]], int],
    tmp_path: Path,
    pool: dict[str, Any],
) -> None:
    """What one engine saved another one loads, each owner its own layers."""
    with start(model, tmp_path / "first", ON, kv_transfer_config=pool) as first:
        same(first.generate(prompts, 8), expected[0])
        with start(model, tmp_path / "second", ON, kv_transfer_config=pool) as second:
            found = second.generate(prompts, 8)
    same(found, expected[0])
    assert [answer["cached"] for answer in found] == [256, 0, 128]


def test_prefill_transfers_what_it_found_in_the_pool(
    model: Path,
    prompts: list[list[int]],
    expected: tuple[list[dict[str, Any]], int],
    tmp_path: Path,
    pool: dict[str, Any],
    ports: Callable[[int], Sequence[int]],
) -> None:
    """Both children in one engine: a prefill engine that is new loads, and decode pulls from it."""
    children = [transfer("kv_producer", ports(RANKS)[0]), pool]
    both = {"kv_connector": "MultiConnector", "kv_role": "kv_both", EXTRA: {"connectors": children}}
    decode = transfer("kv_consumer", ports(RANKS)[0])
    with (
        start(model, tmp_path / "decode", OFF, kv_transfer_config=decode) as consumer,
        start(model, tmp_path / "first", ON, kv_transfer_config=both) as first,
    ):
        same(first.generate(prompts, 8), expected[0])
        children[0]["kv_port"] = ports(RANKS)[0]
        with start(model, tmp_path / "second", ON, kv_transfer_config=both) as second:
            found = second.generate(prompts, 1, {"do_remote_decode": True})
            assert [answer["cached"] for answer in found] == [256, 0, 128]
            for prompt, hit, answer in zip(prompts, found, expected[0], strict=True):
                same(consumer.generate([prompt], 8, hit["params"]), [answer])
        pulls = [line for line in consumer.log().splitlines() if "pulled" in line]
    assert len(pulls) == RANKS * len(prompts)
