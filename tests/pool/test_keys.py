"""What a pool object is named after; that unlike engines never share one is S11 (tests/safety).

Field reports 3.3 (ranks that are not equal), 3.5 (what decides bytes), 3.6 (who asks: by vLLM's
block hashes) and 4.5 (writers and readers that name one block differently).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvpp_connectors.connector.identity import model_numbers, weights_identity
from kvpp_connectors.pool.keys import (
    MAX_KEY,
    Fingerprint,
    LayerId,
    Namespace,
    ObjectName,
    Shard,
    SpeculativeCache,
    Topology,
    hash_seed,
    parse_key,
)
from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.errors import KvppError
from kvpp_core.manifest import Manifest
from kvpp_core.ownership import OwnershipPolicy, assign_owners

CONFIG = {
    "hidden_size": 2048,
    "num_hidden_layers": 5,
    "kv_lora_rank": 512,
    "rope_scaling": {"type": "yarn", "factor": 40},
}
MTP = SpeculativeCache("mtp", "org/model", "", (("mtp.attn", 2624),))
BASE = Fingerprint(
    model="org/model",
    revision="main",
    numbers=model_numbers(CONFIG),
    weights="w0",
    model_dtype="bfloat16",
    kv_cache_dtype="bfloat16",
    quantization="",
    cache_layout="LBNHC",
    block_size=16,
    hash_algorithm="sha256",
    hash_seed="vllm-none-hash",
    speculative=MTP,
)
HASH = bytes(range(32))


def numbers(**changes: object) -> str:
    return model_numbers({**CONFIG, **changes})


def manifest(
    layers: range = range(5),
    ranks: int = 2,
    policy: OwnershipPolicy = OwnershipPolicy.COUNT,
    dtype: str = "bfloat16",
    component_bytes: int = 1152,
) -> Manifest:
    bundles = tuple(
        LayerBundle(i, (Component(f"layers.{i}.attn", component_bytes * (1 + 9 * (i == 0))),))
        for i in layers
    )
    return Manifest(ranks, 16, dtype, bundles, assign_owners(bundles, ranks, policy))


KVPP = Topology.kvpp([manifest()])
NAMES = [f"layers.{i}.attn" for i in range(5)]
# What is changed -> an engine whose objects hold other bytes under the same hashes.
OTHER_FINGERPRINTS: dict[str, Fingerprint] = {
    "another organisation's model of the same base name": replace(BASE, model="foe/model"),
    "revision": replace(BASE, revision="v2"),
    "weights under the same name": replace(BASE, weights="w1"),
    "weights not known": replace(BASE, weights=""),
    "RoPE factor": replace(BASE, numbers=numbers(rope_scaling={"type": "yarn", "factor": 8})),
    "number of layers": replace(BASE, numbers=numbers(num_hidden_layers=6)),
    "dtype of the computation": replace(BASE, model_dtype="float16"),
    "dtype of the cache": replace(BASE, kv_cache_dtype="fp8_e4m3"),
    "quantization": replace(BASE, quantization="w8a8"),
    "cache layout": replace(BASE, cache_layout="LBHNC"),
    "block size": replace(BASE, block_size=32),
    "hash algorithm": replace(BASE, hash_algorithm="sha256_cbor"),
    "hash seed": replace(BASE, hash_seed="0"),
    "drafter off": replace(BASE, speculative=None),
    "draft method": replace(BASE, speculative=replace(MTP, method="eagle3")),
    "draft cache": replace(BASE, speculative=replace(MTP, components=(("mtp.attn", 9),))),
    "draft numbers": replace(BASE, speculative=replace(MTP, numbers="n1")),
    "draft weights": replace(BASE, speculative=replace(MTP, weights="d1")),
    "format of objects": replace(BASE, format_version=2),
}
OTHER_TOPOLOGIES: dict[str, Topology] = {
    "KVPP off": Topology.replicated([NAMES]),
    "KVPP off, two stages": Topology.replicated([NAMES[:3], NAMES[3:]]),
    "KVPP off, heads split": Topology.replicated([NAMES], heads_split_over=2),
    "group size": Topology.kvpp([manifest(ranks=3)]),
    "ownership": Topology.kvpp([manifest(policy=OwnershipPolicy.BYTES)]),
    "dtype": Topology.kvpp([manifest(dtype="fp8")]),
    "bytes of a component": Topology.kvpp([manifest(component_bytes=1153)]),
    "two stages": Topology.kvpp([manifest(range(3)), manifest(range(3, 5))]),
    "another split": Topology.kvpp([manifest(range(2)), manifest(range(2, 5))]),
    "stages in another order": Topology.kvpp([manifest(range(3, 5)), manifest(range(3))]),
    "three stages": Topology.kvpp([manifest(range(i, i + 1)) for i in range(3)]),
}


def test_all_splits_are_pairwise_different() -> None:
    splits = [
        Topology.replicated([NAMES]),
        Topology.replicated([NAMES[:3], NAMES[3:]]),
        Topology.replicated([NAMES[:2], NAMES[2:]]),
        Topology.replicated([NAMES], heads_split_over=2),
        Topology.kvpp([manifest()]),
        Topology.kvpp([manifest(range(3)), manifest(range(3, 5))]),
        Topology.kvpp([manifest(range(2)), manifest(range(2, 5))]),
        # ... with the same first stage
        Topology.kvpp([manifest(range(2)), manifest(range(2, 5), ranks=3)]),
        Topology.kvpp([manifest(range(2)), manifest(range(2, 4)), manifest(range(4, 5))]),
    ]
    assert len({topology.name for topology in splits}) == len(splits)
    assert splits[0].name == "replicated"
    assert splits[4].name == f"kvpp-{manifest().digest()[:32]}"


def test_what_decides_no_bytes_is_shared() -> None:
    same = replace(
        BASE,
        numbers=model_numbers(
            {**dict(reversed(CONFIG.items())), "transformers_version": "9", "_name_or_path": "/x"}
        ),
    )
    assert every_key(Namespace(same, Topology.kvpp([manifest()]))) == every_key(
        Namespace(BASE, KVPP)
    )


@pytest.mark.process
def test_every_process_makes_the_same_keys() -> None:
    code = (
        "from tests.pool.test_keys import BASE, KVPP, every_key, Namespace;"
        "print('\\n'.join(every_key(Namespace(BASE, KVPP))))"
    )
    root = Path(__file__).parents[2]
    for seed in ("1", "2"):
        printed = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        assert printed.split() == every_key(Namespace(BASE, KVPP))


def test_requests_are_kept_apart_by_their_block_hash() -> None:
    space = Namespace(BASE, KVPP)
    assert space.block_key(HASH, Shard(0, 0)) != space.block_key(HASH[::-1], Shard(0, 0))


def test_a_target_and_a_draft_layer_of_one_index_have_two_keys() -> None:
    space = Namespace(BASE, KVPP)
    shard = Shard(0, 1)
    assert len({space.layer_key(HASH, shard, LayerId(draft, 3)) for draft in (False, True)}) == 2


def test_keys_are_safe_for_every_store() -> None:
    deep = Topology.kvpp([manifest(range(i, i + 1), ranks=9) for i in range(3)])
    shard = Shard(1234, 1234)
    space = Namespace(BASE, deep)
    keys = [*every_key(space), space.layer_key(HASH, shard, LayerId(False, 99_999))]
    for key in keys:
        assert re.fullmatch(r"[A-Za-z0-9@-]+", key), key
        assert len(key) <= MAX_KEY
        assert key.startswith(space.prefix + "@")


@pytest.mark.parametrize(
    "topology",
    [
        Topology.replicated([["layer"]]),
        Topology.replicated([["a"], ["b"]], heads_split_over=2),
        Topology.kvpp([manifest()]),
    ],
    ids=lambda topology: topology.name,
)
@pytest.mark.parametrize("length", [8, 32])
def test_a_key_is_taken_apart_into_what_it_was_made_of(topology: Topology, length: int) -> None:
    namespace, name, shard = Namespace(BASE, topology), HASH[:length], Shard(11, 300)
    layer = LayerId(True, 61)
    made = {
        namespace.block_key(name, shard): (None, False, "block"),
        namespace.layer_key(name, shard, layer): (layer, False, "layer"),
        namespace.commit_key(name, shard): (None, True, "marker"),
    }
    for key, (of, marker, kind) in made.items():
        found = parse_key(key)
        assert found == ObjectName(namespace.prefix, name, shard, of, marker)
        assert found.kind == kind


def test_other_keys_are_not_taken_for_ours() -> None:
    namespace = Namespace(BASE, Topology.replicated([["layer"]]))
    key = namespace.block_key(HASH, Shard(0, 0))
    strange = (
        *("", "kvpp-probe", "model@tp0@hash", namespace.prefix, key[:-1], key[1:], key + "0x"),
        *(key + "@x1", key + "@t", key + "@done@done", key + "\n", key.upper(), "x" + key),
        *(key.replace("kvpp1", "kvpp2"), key.replace("replicated", "other"), key + "@t\u0663"),
        *(key + "@t" + "9" * 5000, key.replace("pp0", "pp" + "9" * 5000), key + "9" * 5000),
    )
    assert [text for text in strange if parse_key(text) is not None] == []


def test_a_hit_needs_every_rank_that_keeps_something() -> None:
    one_layer = manifest(range(1))  # rank 1 of 2 keeps nothing
    assert Topology.kvpp([one_layer]).shards == (Shard(0, 0),)
    # ... but its drafts, where the stage has some
    two = Topology.kvpp([manifest(range(1)), manifest(range(1, 2))], stages_with_drafts=[1])
    assert two.shards == (Shard(0, 0), Shard(1, 0), Shard(1, 1))
    space = Namespace(BASE, two)
    assert space.required_keys(HASH, layerwise=False) == tuple(
        space.block_key(HASH, shard) for shard in two.shards
    )
    assert space.required_keys(HASH, layerwise=True) == tuple(
        space.commit_key(HASH, shard) for shard in two.shards
    )


@pytest.mark.parametrize(
    ("algorithm", "environment", "seed"),
    [
        ("sha256", {}, "vllm-none-hash"),
        ("sha256_cbor", {}, "vllm-none-hash"),
        ("sha256", {"PYTHONHASHSEED": "0"}, "0"),
        ("xxhash", {"PYTHONHASHSEED": "7"}, "7"),
    ],
)
def test_the_seed_is_the_one_that_vllm_uses(
    algorithm: str, environment: dict[str, str], seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hash_seed(algorithm, environment) == seed
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve_none_hash_seed(get_hash_fn_by_name(algorithm)) == seed


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin"])
def test_a_seed_of_each_process_its_own_is_refused(algorithm: str) -> None:
    with pytest.raises(KvppError, match="Set PYTHONHASHSEED to one value on all nodes"):
        hash_seed(algorithm, {})


@pytest.mark.parametrize("length", [0, 7, 33, 64])
def test_what_is_no_block_hash_is_refused(length: int) -> None:
    with pytest.raises(KvppError, match=f"a block hash of {length} bytes"):
        Namespace(BASE, KVPP).block_key(bytes(length), Shard(0, 0))


@pytest.mark.parametrize("field", ["model", "numbers", "hash_algorithm", "hash_seed"])
def test_an_empty_identity_is_refused(field: str) -> None:
    with pytest.raises(KvppError, match=f"needs {field}"):
        replace(BASE, **{field: ""})  # type: ignore[arg-type]


def test_a_cache_dtype_that_says_nothing_is_refused() -> None:
    with pytest.raises(KvppError, match="auto"):
        replace(BASE, kv_cache_dtype="auto")


def test_a_topology_without_shards_is_refused() -> None:
    with pytest.raises(KvppError, match="every block would be a hit"):
        Topology.replicated([])
    with pytest.raises(KvppError, match="the manifest of every pipeline stage"):
        Topology.kvpp([])


def test_a_configuration_that_differs_by_process_is_refused() -> None:
    with pytest.raises(KvppError, match="no text that is the same in every process"):
        model_numbers({"hidden_act": object()})


def test_configurations_may_hold_sets_paths_and_dtypes() -> None:
    import torch

    texts = [model_numbers({"x": {"b", "a"}, "y": Path("/z"), "d": torch.float16}) for _ in "ab"]
    assert texts[0] == texts[1] != model_numbers({"x": {"a"}, "y": Path("/z"), "d": torch.float16})


def test_other_weights_of_the_same_shape_are_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "copy", "short")]
    ends = (b"\1", b"\2", b"\1", b"")
    for folder, end in zip(folders, ends, strict=True):
        folder.mkdir()
        (folder / "model-00001.safetensors").write_bytes(bytes(300_000) + end)
        (folder / "config.json").write_text(folder.name)
    one, other, copy, short = (weights_identity(folder) for folder in folders)
    assert one == copy
    assert len({one, other, short}) == 3
    assert weights_identity(tmp_path / "org/model") == weights_identity(tmp_path) == ""


def every_key(space: Namespace) -> list[str]:
    """The keys of one block for every shard and five layers."""
    keys = []
    for shard in space.topology.shards:
        keys += [space.block_key(HASH, shard), space.commit_key(HASH, shard)]
        keys += [space.layer_key(HASH, shard, LayerId(d, i)) for d in (False, True) for i in (0, 4)]
    return keys
