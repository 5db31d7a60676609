"""The facts that ranks agree on, and their digest. That ranks refuse to differ is S8 (safety)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpp_core.bundles import Component, LayerBundle, group_bundles
from kvpp_core.manifest import Manifest, first_difference

BUNDLES = (
    LayerBundle(0, (Component("layers.0.attn", 2624), Component("layers.0.indexer", 528))),
    LayerBundle(1, (Component("layers.1.attn", 2624),)),
)
MANIFEST = Manifest(2, 4, "fp8_ds_mla", BUNDLES, (0, 1))


def _with_bundle(index: int, bundle: LayerBundle) -> Manifest:
    bundles = list(BUNDLES)
    bundles[index] = bundle
    return replace(MANIFEST, bundles=tuple(bundles))


# What differs -> (the field that must be named, both values as the error shows them).
DIFFERENT: dict[str, tuple[Manifest, str, str, str]] = {
    "ranks": (replace(MANIFEST, ranks=3), "manifest.ranks", "2", "3"),
    "block size": (replace(MANIFEST, block_size=8), "manifest.block_size", "4", "8"),
    "kv dtype": (
        replace(MANIFEST, kv_cache_dtype="bfloat16"),
        "manifest.kv_cache_dtype",
        '"fp8_ds_mla"',
        '"bfloat16"',
    ),
    "owner": (replace(MANIFEST, owners=(0, 0)), "manifest.layers.1.owner", "1", "0"),
    "bytes": (
        _with_bundle(1, LayerBundle(1, (Component("layers.1.attn", 2688),))),
        "manifest.layers.1.components.layers.1.attn",
        "2624",
        "2688",
    ),
    "name": (
        _with_bundle(1, LayerBundle(1, (Component("layers.1.mla", 2624),))),
        "manifest.layers.1.components.layers.1.attn",
        "2624",
        "nothing",
    ),
    "component more": (
        _with_bundle(1, LayerBundle(1, (*BUNDLES[1].components, Component("scale", 16)))),
        "manifest.layers.1.components.scale",
        "nothing",
        "16",
    ),
    "layer index": (
        _with_bundle(1, LayerBundle(2, BUNDLES[1].components)),
        "manifest.layers.1",
        json.dumps({"components": {"layers.1.attn": 2624}, "owner": 1}),
        "nothing",
    ),
}


def test_the_digest_is_the_hash_of_canonical_json() -> None:
    """Other processes and versions compute the same: pools and decode peers rely on it."""
    document = {
        "block_size": 4,
        "kv_cache_dtype": "fp8_ds_mla",
        "layers": {
            "0": {"components": {"layers.0.attn": 2624, "layers.0.indexer": 528}, "owner": 0},
            "1": {"components": {"layers.1.attn": 2624}, "owner": 1},
        },
        "ranks": 2,
        "version": 1,
    }
    text = json.dumps(document, separators=(",", ":"))
    assert MANIFEST.digest() == hashlib.sha256(text.encode()).hexdigest()


@settings(deadline=None, max_examples=50)
@given(st.permutations([(b.layer, c) for b in BUNDLES for c in b.components]))
def test_the_digest_does_not_depend_on_the_order_in_which_caches_are_found(
    pairs: list[tuple[int, Component]],
) -> None:
    assert replace(MANIFEST, bundles=group_bundles(pairs)).digest() == MANIFEST.digest()


def test_the_digest_differs_when_any_field_does() -> None:
    digests = {manifest.digest() for manifest, *_ in DIFFERENT.values()}
    assert len(digests) == len(DIFFERENT)
    assert MANIFEST.digest() not in digests


JSON = st.recursive(
    st.integers(0, 3) | st.sampled_from(["a", "b"]),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300)
@given(JSON, JSON)
def test_the_first_difference_is_a_place_where_the_documents_differ(left: Any, right: Any) -> None:
    if left == right:
        with pytest.raises(ValueError, match="no difference"):
            first_difference(left, right)
        return
    path, mine, theirs = first_difference(left, right)
    assert mine != theirs
    assert mine == _text_at(left, path)
    assert theirs == _text_at(right, path)


def _text_at(document: Any, path: str) -> str:
    for key in path.split(".") if path else []:
        if not isinstance(document, dict) or key not in document:
            return "nothing"
        document = document[key]
    return json.dumps(document)
