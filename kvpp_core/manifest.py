"""The facts that the ranks of a group must agree on, and the check that they do.

A difference found here is an error with both values; found later it would be a hang or wrong bytes.
The manifest's digest also identifies the topology to a KV pool and to a decode peer, so it holds
only what determines bytes and owners. What else determines collectives (block count, broadcast
policy, staging) is compared as ``run`` facts, which are not in the digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpp_core.bundles import LayerBundle
from kvpp_core.errors import ManifestMismatch

__all__ = ["Manifest", "agree", "first_difference"]

MANIFEST_VERSION = 1

RunFacts = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Ownership of one KVPP group: who keeps which bundle, and how large its components are.

    Ranks are group ranks, so that the replicas of a data-parallel deployment get one digest.
    """

    ranks: int
    block_size: int  # tokens
    kv_cache_dtype: str
    bundles: tuple[LayerBundle, ...]
    owners: tuple[int, ...]  # group rank, by bundle

    def document(self) -> dict[str, Any]:
        """The manifest as plain data, ready for canonical JSON."""
        return {
            "version": MANIFEST_VERSION,
            "ranks": self.ranks,
            "block_size": self.block_size,
            "kv_cache_dtype": self.kv_cache_dtype,
            "layers": {
                str(bundle.layer): {
                    "owner": owner,
                    "components": {c.name: c.bytes_per_block for c in bundle.components},
                }
                for bundle, owner in zip(self.bundles, self.owners, strict=True)
            },
        }

    def digest(self) -> str:
        """SHA-256 of the canonical JSON, as hexadecimal."""
        return hashlib.sha256(_canonical(self.document())).hexdigest()


def agree(
    manifest: Manifest,
    run: RunFacts,
    global_ranks: Sequence[int],
    all_gather: Callable[[bytes], list[bytes]],
) -> None:
    """Compare this rank's facts with every other rank's. Collective: all ranks must call it.

    ``global_ranks`` names the ranks of the group in the error; ``all_gather`` returns the
    payloads of all ranks in group order.

    Raises:
        ManifestMismatch: on every rank alike, naming the first field that differs and its value
            on the two ranks.
    """
    mine = _canonical({"manifest": manifest.document(), "run": dict(run)})
    documents = all_gather(mine)
    for rank, theirs in enumerate(documents):
        if theirs == documents[0]:
            continue
        path, reference, other = first_difference(json.loads(documents[0]), json.loads(theirs))
        raise ManifestMismatch(
            f"the ranks of KVPP group {list(global_ranks)} do not agree on {path}: "
            f"rank {global_ranks[0]} has {reference}, rank {global_ranks[rank]} has {other}. "
            "Start all ranks with the same model, options and package versions."
        )


def first_difference(left: Any, right: Any, path: str = "") -> tuple[str, str, str]:
    """The first place where two JSON documents differ: its path and both values as text.

    Raises:
        ValueError: the documents are equal.
    """
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(key for key in right if key not in left)]:
            here = f"{path}.{key}" if path else key
            if key not in left or key not in right:
                return here, _text(left, key), _text(right, key)
            if left[key] != right[key]:
                return first_difference(left[key], right[key], here)
    if left == right:
        raise ValueError(f"no difference at {path or 'the root'}")
    return path, json.dumps(left), json.dumps(right)


def _text(document: dict[str, Any], key: str) -> str:
    return json.dumps(document[key]) if key in document else "nothing"


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
