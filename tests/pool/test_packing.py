"""An object holds the bytes that its rank keeps, all of them and no others.

Field report 3.4: draft layers and scales belong to the object.
"""

from __future__ import annotations

import pytest
import torch

from kvpp_connectors.pool.keys import LayerId
from kvpp_connectors.pool.packing import CacheBlocks, Inventory
from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.errors import KvppError
from tests.core.rank_memory import POISON, RankMemory, pattern, uneven_model

BLOCKS = 6


def caches_of(memory: RankMemory) -> dict[str, torch.Tensor]:
    """As vLLM has them: every layer's components, those in scratch too."""
    placement = memory.placement
    bundles = (*placement.bundles, *placement.drafts)
    return {c.name: memory.rows(c) for bundle in bundles for c in bundle.components}


def memory_of(layers: int, ranks: int, rank: int) -> RankMemory:
    memory = RankMemory(uneven_model(layers).placement(ranks, rank), BLOCKS)
    memory.store_owned(generation=1)
    memory.store_drafts(generation=1)
    return memory


def expected(inventory: Inventory, block: int, writer: int) -> torch.Tensor:
    """A payload, from the patterns."""
    rows = [
        pattern(p.component.name, block, writer, 1, p.component.bytes_per_block)
        for p in inventory.parts
    ]
    return torch.cat(rows)


SPLITS = [
    (layers, ranks, rank)
    for layers, ranks in ((5, 2), (7, 2), (7, 3), (1, 2), (4, 4), (2, 5))
    for rank in range(ranks)
]


@pytest.mark.parametrize(("layers", "ranks", "rank"), SPLITS)
def test_gather_takes_own_layers_and_drafts_and_never_scratch(
    layers: int, ranks: int, rank: int
) -> None:
    memory = memory_of(layers, ranks, rank)
    inventory = Inventory.kept(memory.placement)
    owned = [layer.index for layer in inventory.layers if not layer.draft]
    assert owned == [memory.placement.bundles[i].layer for i in memory.placement.owned]
    assert [layer for layer in inventory.layers if layer.draft] == [LayerId(True, layers)]

    blocks = [4, 0, 5]
    whole = torch.full((3, inventory.payload_bytes + 26), 0xA5, dtype=torch.uint8)
    staged = whole[:, 13:-13]
    CacheBlocks(caches_of(memory), inventory).gather(blocks, staged)
    for row, block in zip(staged, blocks, strict=True):
        assert torch.equal(row, expected(inventory, block, rank))
    assert not (staged == POISON).any(), "scratch is POISON and must not be saved"
    assert (whole[:, :13] == 0xA5).all() and (whole[:, -13:] == 0xA5).all()
    assert memory.difference() == []


@pytest.mark.parametrize(("layers", "ranks", "rank"), SPLITS)
def test_scatter_restores_the_blocks_and_nothing_else(layers: int, ranks: int, rank: int) -> None:
    source, target = memory_of(layers, ranks, rank), memory_of(layers, ranks, rank)
    inventory = Inventory.kept(source.placement)
    staged = torch.empty(2, inventory.payload_bytes, dtype=torch.uint8)
    CacheBlocks(caches_of(source), inventory).gather([1, 3], staged)
    for bundle in (*target.placement.bundles, *target.placement.drafts):
        for component in bundle.components:
            if component.name in {p.component.name for p in inventory.parts}:
                target.rows(component)[torch.tensor([1, 3])] = 0x77
    CacheBlocks(caches_of(target), inventory).scatter(staged, [1, 3])
    assert target.difference() == []  # scratch, other blocks and sentinels, too


@pytest.mark.parametrize(("layers", "ranks", "rank"), SPLITS)
def test_pieces_are_the_payload_where_it_lies(layers: int, ranks: int, rank: int) -> None:
    import ctypes

    memory = memory_of(layers, ranks, rank)
    inventory = Inventory.kept(memory.placement)
    pieces = CacheBlocks(caches_of(memory), inventory).segments(2)
    read = b"".join(
        ctypes.string_at(address, size)
        for address, size in zip(pieces.addresses, pieces.sizes, strict=True)
    )
    assert read == expected(inventory, 2, rank).numpy().tobytes()
    assert pieces.total == inventory.payload_bytes


@pytest.mark.parametrize("draft", [False, True])
def test_a_layer_alone_is_its_part_of_the_whole(draft: bool) -> None:
    memory = memory_of(7, 2, 1)
    inventory = Inventory.kept(memory.placement)
    layer = next(layer for layer in inventory.layers if layer.draft is draft)
    alone = inventory.of_layer(layer)
    staged = torch.empty(1, alone.payload_bytes, dtype=torch.uint8)
    CacheBlocks(caches_of(memory), alone).gather([3], staged)
    assert torch.equal(staged[0], expected(alone, 3, 1))
    parts = [inventory.of_layer(each) for each in inventory.layers]
    assert sum(part.payload_bytes for part in parts) == inventory.payload_bytes
    assert len({part.digest() for part in [*parts, inventory]}) == len(parts) + 1


def test_a_rank_without_layers_and_drafts_has_no_bytes() -> None:
    model = uneven_model(1)._replace(drafts=())
    inventory = Inventory.kept(model.placement(2, 1))
    assert inventory.payload_bytes == 0 and inventory.layers == ()


def test_real_dtypes_and_strides_keep_their_bytes() -> None:
    """Unlike dtypes side by side in one block: rows are strided, scales at odd places."""
    storage = torch.arange(BLOCKS * 1_000, dtype=torch.int32).to(torch.uint8)
    main = storage.view(BLOCKS, 1_000)[:, :512].view(torch.bfloat16).view(BLOCKS, 4, 64)
    scale = storage.view(BLOCKS, 1_000)[:, 514:546].view(torch.float16).view(BLOCKS, 16, 1)
    caches = {"main": main, "scale": scale}
    bundle = LayerBundle(0, (Component("main", 512), Component("scale", 32)))
    blocks = CacheBlocks(caches, Inventory.of_bundles([bundle]))
    staged = torch.empty(2, 544, dtype=torch.uint8)
    blocks.gather([5, 2], staged)
    for row, block in zip(staged, (5, 2), strict=True):
        raw = storage.view(BLOCKS, 1_000)[block]
        assert torch.equal(row, torch.cat([raw[:512], raw[514:546]]))
    before = storage.clone()
    blocks.scatter(torch.full_like(staged, 9), [5, 2])
    changed = (storage != before).view(BLOCKS, 1_000)
    assert not changed[:, 512:514].any() and not changed[:, 546:].any()
    assert not changed[torch.tensor([0, 1, 3, 4])].any()
    assert (storage.view(BLOCKS, 1_000)[2, 514:546] == 9).all()
    assert len(blocks.storages()) == 1


@pytest.mark.parametrize(
    ("caches", "says"),
    [
        ({}, "cache 'a' is not among this rank's 0 caches"),
        (
            {"a": torch.zeros(4, 9, dtype=torch.uint8)},
            "cache 'a' .* has 36 bytes; the engine planned 4 blocks of 8 bytes",
        ),
        ({"a": torch.zeros(4, 4, 3, dtype=torch.uint8)[..., :2]}, "is not in one piece"),
    ],
)
def test_caches_that_do_not_fit_the_plan_are_refused(
    caches: dict[str, torch.Tensor], says: str
) -> None:
    inventory = Inventory.of_bundles([LayerBundle(0, (Component("a", 8),))])
    with pytest.raises(KvppError, match=says):
        CacheBlocks(caches, inventory)


def test_a_layer_of_another_rank_is_refused_by_name() -> None:
    inventory = Inventory.kept(uneven_model(5).placement(2, 0))
    with pytest.raises(KvppError, match="layer t4 is not kept by this rank, which keeps t0, t1"):
        inventory.of_layer(LayerId(False, 4))


def test_wrong_blocks_and_staging_are_refused_before_a_byte_moves() -> None:
    memory = memory_of(5, 2, 0)
    inventory = Inventory.kept(memory.placement)
    blocks = CacheBlocks(caches_of(memory), inventory)
    staged = torch.zeros(2, inventory.payload_bytes, dtype=torch.uint8)
    with pytest.raises(KvppError, match="not among the 6"):
        blocks.scatter(staged, [0, 6])
    with pytest.raises(KvppError, match="not among the 6"):
        blocks.segments(-1)
    with pytest.raises(KvppError, match="loaded twice"):
        blocks.scatter(staged, [1, 1])
    with pytest.raises(KvppError, match="expected uint8"):
        blocks.gather([0, 1], staged[:, :-1])
    assert memory.difference() == []
