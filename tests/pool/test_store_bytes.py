"""Every byte of a store after an engine has saved: each object holds its owner's bytes for its
tokens, and nothing else is there.

The objects are read by a client and a reader of their own (object_reader.py). The bytes are
compared with those that an engine without KVPP and without a pool keeps of the same tokens, where
every rank has every layer; KVPP's are equal to the last bit.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvpp_connectors.mooncake_admin.master_http import MasterHttp
from tests.engine import tiny_models
from tests.engine.harness import Request, Script, kvpp_off, kvpp_on, random_tokens, start_engine
from tests.fork_server import call_apart
from tests.pool.master import Master
from tests.pool.object_reader import HEADER, Component, read_object
from tests.pool.store_process import StoreProcess
from tests.pool.stores import raw_mooncake

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("patient_clients"),
]

MTP = {"method": "mtp", "num_speculative_tokens": 1}
LENGTHS = (150, 64, 30)  # the last one's second block is filled by decoding
PROMPTS = [random_tokens(seed, length) for seed, length in enumerate(LENGTHS)]
LAYERS, DRAFT = 6, 6  # the draft's layer counts on from the target's
OWNED = {"pp0r0": range(3), "pp0r1": range(3, 6)}

Caches = dict[str, bytes]  # by layer name, of one block


class Kept(NamedTuple):
    """What an engine keeps of a prompt's blocks, and the answers."""

    blocks: dict[bytes, Caches]  # by vLLM's block hash
    answers: list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse model: unlike layers, and a draft."""
    folder = tmp_path_factory.mktemp("bytes") / "model"
    return tiny_models.write(folder, replace(tiny_models.SHARED, layers=LAYERS, drafts=1))


@pytest.fixture(scope="module")
def kept(model: Path) -> Kept:
    """What is to be in the objects."""
    return call_apart(keep, model)


def keep(model: Path) -> Kept:
    """Run an engine without KVPP and pool, and read its caches."""
    with start_engine(model, kvpp_off(), tp=2, speculative_config=MTP) as engine:
        answers = answer(engine)
        ids = {h: block for p in PROMPTS for h, block in engine.cached_blocks(p).items()}
        ranks = engine.call("observe_blocks", list(ids.values()))
        assert ranks[0] == ranks[1], "the ranks are to keep the same"
        return Kept(dict(zip(ids, ranks[0], strict=True)), answers)


def save(model: Path, transfer: dict[str, Any]) -> list[list[int]]:
    """Run an engine with KVPP until it has saved everything."""
    options: dict[str, Any] = {"speculative_config": MTP, "kv_transfer_config": transfer}
    with start_engine(model, kvpp_on(), tp=2, **options) as engine:
        answers = answer(engine)
        engine.drain()
        return answers


def answer(engine: Any) -> list[list[int]]:
    """One prompt after the other: a batch's composition may decide the last bits of a sum."""
    scripts = (Script((Request(prompt, max_tokens=4),)) for prompt in PROMPTS)
    return [engine.run(script).answers[0].tokens for script in scripts]


def read_store(address: str, keys: list[str]) -> dict[str, bytes]:
    """Every object, by a client of Mooncake's own binding."""
    client = raw_mooncake(address)
    objects = {key: client.get(key) for key in keys}
    client.close()
    return objects


def components(caches: Caches, layer: int) -> list[Component]:
    """The caches of one layer in the order in which an object has them."""
    tag = f"d{layer}" if layer == DRAFT else f"t{layer}"
    names = sorted(name for name in caches if f".layers.{layer}." in name)
    return [Component(tag, name, len(caches[name])) for name in names]


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole blocks", "layer by layer"])
def test_each_object_holds_its_owners_bytes_of_its_tokens_and_nothing_else(
    model: Path, kept: Kept, layerwise: bool
) -> None:
    """The layers of `OWNED` and each rank's own drafts, whole, under their keys; no scratch."""
    master = Master()
    store = StoreProcess(master, "64MB")
    try:
        transfer = {
            "kv_connector": "AscendStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "mooncake": {"master_server_address": master.address, "global_segment_size": 0},
                "lookup_deadline_s": 30.0,
                "use_layerwise": layerwise,
            },
        }
        assert call_apart(save, model, transfer) == kept.answers
        objects = call_apart(read_store, master.address, MasterHttp(master.at).keys())
        used = MasterHttp(master.at).metrics()["master_allocated_bytes"]
    finally:
        store.stop()
        master.stop()

    (namespace,) = {key.rsplit("@pp", 1)[0].rsplit("@", 1)[0] for key in objects}
    expected: dict[str, tuple[list[Component], list[bytes]]] = {}
    for block_hash, caches in kept.blocks.items():
        for shard, owned in OWNED.items():
            key = f"{namespace}@{block_hash.hex()}@{shard}"
            layers = [components(caches, layer) for layer in (*owned, DRAFT)]
            if layerwise:
                expected[f"{key}@done"] = [], []
                for layer in layers:
                    expected[f"{key}@{layer[0].layer}"] = layer, [caches[c.name] for c in layer]
            else:
                whole = list(itertools.chain.from_iterable(layers))
                expected[key] = whole, [caches[c.name] for c in whole]
    assert sorted(objects) == sorted(expected)
    for key, (parts, pieces) in expected.items():
        found = read_object(key, objects[key], parts)
        wrong = [c.name for c, a, b in zip(parts, found, pieces, strict=True) if a != b]
        assert not wrong, f"{key} holds other bytes of {wrong}"
    bare = sum(HEADER + sum(c.size for c in parts) for parts, _ in expected.values())
    assert used == bare == sum(map(len, objects.values()))


def test_no_bytes_could_be_taken_for_others(kept: Kept) -> None:
    """Else the test above would not see an exchange: layers, components and blocks all differ."""
    assert len(kept.blocks) == sum(length // 16 for length in LENGTHS)
    owners: dict[bytes, list[str]] = defaultdict(list)
    for block_hash, caches in kept.blocks.items():
        assert len(caches) == LAYERS + 1 + LAYERS + 1 - len(tiny_models.SHARED.shared)
        for name, data in caches.items():
            owners[data].append(f"{name} of {block_hash.hex()}")
    assert [names for names in owners.values() if len(names) > 1] == []
