"""What is read from where: pure functions from two sides' regions to a list of reads.

Components are paired by name, never by position: pipeline stages and owners split layers in their
own ways on both sides. A target layer comes from the worker that keeps it, a draft layer from one
of those that have it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from kvpp_connectors.connector.identity import ModelIdentity
from kvpp_connectors.connector.transfer_engine import Read
from kvpp_connectors.p2p.protocol import Description, Region
from kvpp_core.errors import KvppError

__all__ = ["Incompatible", "cache_regions", "choose_sources", "plan_reads", "split_shares"]

LARGEST_READ = 4 << 20  # bytes; longer runs are cut, so that one read ends in bounded time


class Incompatible(KvppError):
    """The two sides' caches do not fit together."""


def cache_regions(
    rows: Mapping[str, torch.Tensor], heads_first: Collection[str] = ()
) -> list[Region]:
    """Where each component's blocks lie, from their rows: uint8 (blocks, bytes per block).

    ``heads_first``: components in whose blocks the tokens of a head follow each other.
    """
    return [
        Region(
            name=name,
            base=blocks.data_ptr(),
            stride=blocks.stride(0),
            block_bytes=blocks.shape[1],
            num_blocks=blocks.shape[0],
            heads_first=name in heads_first,
        )
        for name, blocks in rows.items()
    ]


def choose_sources(
    own: Description, workers: Sequence[Description], spread: int = 0
) -> dict[str, tuple[str, Region]]:
    """For each component of this worker, the session that keeps it and where.

    Where several workers keep a component, ``spread`` (this worker's rank) chooses among them.

    Raises:
        Incompatible: the sides differ in what decides bytes, or nobody keeps a component; names
            both values.
    """
    for peer in workers:
        if unlike := _differences(own, peer):
            listed = (
                f"{name} is {mine!r} here and {other!r} there" for name, mine, other in unlike
            )
            raise Incompatible(f"the KV of {peer.session} cannot be used here: {', '.join(listed)}")
    keepers: dict[str, list[tuple[str, Region]]] = {}
    for peer in workers:
        for region in peer.regions:
            keepers.setdefault(region.name, []).append((peer.session, region))
    sources = {}
    for region in own.regions:
        found = keepers.get(region.name)
        if not found:
            raise Incompatible(
                f"{region.name} is kept here and by none of {', '.join(p.session for p in workers)}"
                "; do both sides run the same model and the same speculative method?"
            )
        session, theirs = found[spread % len(found)]
        if theirs.block_bytes != region.block_bytes:
            raise Incompatible(
                f"a block of {region.name} has {region.block_bytes:,} bytes here and "
                f"{theirs.block_bytes:,} at {session}"
            )
        if theirs.heads_first != region.heads_first:
            first, beside = ("here", session) if region.heads_first else (session, "here")
            raise Incompatible(
                f"the blocks of {region.name} hold their heads one after another at {first} and "
                f"beside each token at {beside}; give both sides the same VLLM_KV_CACHE_LAYOUT"
            )
        sources[region.name] = session, theirs
    return sources


def _differences(own: Description, peer: Description) -> list[tuple[str, object, object]]:
    """What decides the bytes of a block and is not the same: its name, ours, the peer's."""
    found: list[tuple[str, object, object]] = [
        (f"the model's {name}", mine, theirs)
        for name, mine, theirs in ModelIdentity.differences(own.model, peer.model)
    ]
    for name in ("block_size", "kv_cache_dtype"):
        mine, theirs = getattr(own, name), getattr(peer, name)
        if mine != theirs:
            found.append((name, mine, theirs))
    return found


def split_shares(regions: Sequence[Region], members: int) -> list[list[Region]]:
    """Which member of a decode group pulls which components, in even parts of the bytes.

    Every member computes it for itself: it depends on names and sizes alone.
    """
    shares: list[list[Region]] = [[] for _ in range(members)]
    sizes = [0] * members
    for region in sorted(regions, key=lambda region: -region.block_bytes):
        least = sizes.index(min(sizes))
        shares[least].append(region)
        sizes[least] += region.block_bytes
    return shares


def plan_reads(
    own: Iterable[Region],
    sources: Mapping[str, tuple[str, Region]],
    remote_blocks: Sequence[int],
    local_blocks: Sequence[int],
) -> list[Read]:
    """Reads of ``remote_blocks`` into ``local_blocks``, neighbours joined.

    Raises:
        Incompatible: a block lies outside the pool of its side, or the lists differ in length.
    """
    if len(remote_blocks) != len(local_blocks):
        raise Incompatible(
            f"{len(remote_blocks)} blocks there, {len(local_blocks)} here for the same tokens"
        )
    reads = []
    for region in own:
        session, theirs = sources[region.name]
        _check_blocks(remote_blocks, theirs.num_blocks, f"the peer's {region.name}")
        _check_blocks(local_blocks, region.num_blocks, region.name)
        dense = region.stride == region.block_bytes == theirs.stride
        longest = max(1, LARGEST_READ // region.block_bytes) if dense else 1
        for start, length in _runs(remote_blocks, local_blocks, longest):
            reads.append(
                Read(
                    session,
                    theirs.base + remote_blocks[start] * theirs.stride,
                    region.base + local_blocks[start] * region.stride,
                    length * region.block_bytes,
                )
            )
    return reads


def _check_blocks(blocks: Sequence[int], count: int, what: str) -> None:
    if blocks and not 0 <= min(blocks) <= max(blocks) < count:
        raise Incompatible(f"block {max(blocks)} of {what} is asked for, which has {count}")


def _runs(remote: Sequence[int], local: Sequence[int], longest: int) -> Iterable[tuple[int, int]]:
    """(start, length) of stretches that are consecutive on both sides."""
    start = 0
    for at in range(1, len(remote) + 1):
        broken = (
            at == len(remote)
            or at - start >= longest
            or remote[at] != remote[at - 1] + 1
            or local[at] != local[at - 1] + 1
        )
        if broken:
            yield start, at - start
            start = at
