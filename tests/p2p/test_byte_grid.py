"""Every byte of a pull lands where its component's name says, whatever the two sides' ranks are.

Real workers, control ports, leases and Transfer Engines over loopback; no vLLM engine. Each cache
row says which component, block and worker it is of, and memory around the payload is sentinel.
Field reports 3.1 (pipeline stages paired by position), 3.4 (draft layers and scales do not travel),
3.7 (unequal rank counts) and 1.2 (unlike peers that shake hands).
3.2: layers have names here, never numbers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from kvpp_connectors.connector.caches import kept_rows
from kvpp_connectors.connector.facts import RankPosition
from kvpp_connectors.p2p.read_plan import cache_regions
from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.layout import Placement, build_layout
from kvpp_core.ownership import assign_owners
from tests.core.rank_memory import ALIGNED, UNALIGNED, uneven_model
from tests.p2p.conftest import Machine
from tests.p2p.kv_memory import KvMemory, laid_out
from tests.p2p.sides import BLOCK_SIZE, MODEL, Decode, Prefill, engine_facts, listening, planned

LAYERS = 5  # layers 0 and 3 have an indexer and its scales
TARGETS, DRAFTS = uneven_model(LAYERS)[:2]
PREFILL_BLOCKS, DECODE_BLOCKS = 12, 16
TOKENS = 6 * BLOCK_SIZE - 3  # the sixth block is not full


@dataclass(frozen=True)
class Side:
    """An engine's ranks, and how its stages split the layers."""

    pp: int = 1
    pcp: int = 1
    tp: int = 1
    split: tuple[int, ...] = (LAYERS,)
    kvpp: bool = False
    interleaved: bool = False  # all components of a block side by side
    targets: tuple[LayerBundle, ...] = TARGETS
    drafts: tuple[LayerBundle, ...] = DRAFTS

    def __str__(self) -> str:
        split = "+".join(map(str, self.split))
        kind = "kvpp" if self.kvpp else "interleaved" if self.interleaved else "replicated"
        return f"pp{self.pp}-pcp{self.pcp}-tp{self.tp}-{split}-{kind}"

    def workers(self) -> Iterator[tuple[int, RankPosition, Placement]]:
        """Number, position and placement of each worker. Drafts are on the last stage."""
        ends = list(itertools.accumulate(self.split))
        for pp, pcp, tp in itertools.product(range(self.pp), range(self.pcp), range(self.tp)):
            stage = self.targets[ends[pp] - self.split[pp] : ends[pp]]
            drafts = self.drafts if pp == self.pp - 1 else ()
            position = RankPosition(pp, pcp, tp, self.pcp, self.tp)
            group = position.group_size, position.group_rank
            ranks, rank = group if self.kvpp else (1, 0)
            placement = Placement(stage, assign_owners(stage, ranks), ranks, rank, drafts)
            yield position.engine_rank, position, placement


PREFILLS = [
    *(
        Side(pp, pcp, tp, ((5,), (3, 2))[pp - 1], kvpp, interleaved=not kvpp and pcp == 2)
        for pp, pcp, tp in itertools.product((1, 2), repeat=3)
        for kvpp in (False, True)
        if not kvpp or pcp * tp > 1
    ),
    Side(pp=2, split=(2, 3)),
    Side(pp=2, split=(4, 1), interleaved=True),
    Side(pp=2, tp=2, split=(4, 1), kvpp=True),  # the second rank of the last stage owns nothing
    Side(pp=2, pcp=2, tp=2, split=(2, 3), kvpp=True),  # three ranks own nothing
]
DECODES = [
    Side(),
    Side(tp=2, interleaved=True),
    Side(pp=2, split=(3, 2), interleaved=True),
    Side(pp=2, tp=2, split=(1, 4)),
]
# Blocks of the prompt at prefill and at decode, and tokens that decode has already.
BLOCKS = [
    ((3, 4, 5, 6, 7, 8), (9, 10, 11, 12, 13, 14), 0),
    ((11, 0, 5, 6, 7, 2), (3, 15, 4, 5, 6, 0), 0),
    ((3, 4, 5, 6, 9, 11), (2, 9, 10, 5, 6, 15), 0),  # neighbours on one side only
    ((1, 2, 9, 8, 10, 11), (7, 2, 1, 0, 8, 9), 2 * BLOCK_SIZE),
]


@dataclass
class Running:
    """A prefill engine with caches that are full of its workers' patterns."""

    engine: Prefill
    keepers: dict[str, set[int]]  # component -> the workers that keep it


@contextlib.contextmanager
def prefilled(side: Side, machine: Machine, **changes: object) -> Iterator[Running]:
    """Start a prefill engine; ``changes`` make its workers' facts differ from its lease's."""
    engine = Prefill(engine_facts("prefill", pp=side.pp, pcp=side.pcp, tp=side.tp))
    keepers: dict[str, set[int]] = {}
    with contextlib.closing(engine):
        for number, ranks, placement in side.workers():
            memory = laid_out(placement, PREFILL_BLOCKS, ALIGNED, side.interleaved)
            memory.use(machine.arenas[number])
            for name in kept(placement):
                memory.write(name, number, generation=1)
                keepers.setdefault(name, set()).add(number)
            engine.add_worker(
                ranks,
                {name: memory.cache(name, torch.int16) for name in memory.rows},
                machine.prefill[number % 4],
                build_layout(placement, PREFILL_BLOCKS) if side.kvpp else None,
                **changes,
            )
        yield Running(engine, keepers)


@contextlib.contextmanager
def decoding(side: Side, machine: Machine) -> Iterator[tuple[Decode, list[KvMemory]]]:
    """Start a decode engine whose caches are poisoned."""
    engine = Decode(engine_facts("decode", pp=side.pp, tp=side.tp))
    memories = []
    with contextlib.closing(engine):
        for number, ranks, placement in side.workers():
            memory = laid_out(placement, DECODE_BLOCKS, UNALIGNED, side.interleaved)
            memory.use(machine.decode_arenas[number])
            memories.append(memory)
            caches = {name: memory.of(name) for name in kept(placement)}
            engine.add_worker(ranks, caches, machine.decode)
        yield engine, memories


def kept(placement: Placement) -> list[str]:
    """Components that a worker keeps, by the specification: its own layers, and all drafts."""
    own = [
        b
        for b, owner in zip(placement.bundles, placement.owners, strict=True)
        if owner == placement.rank
    ]
    return [c.name for bundle in (*own, *placement.drafts) for c in bundle.components]


@pytest.mark.parametrize("side", PREFILLS, ids=str)
def test_every_byte_lands_where_its_name_says(side: Side, machine: Machine) -> None:
    """3.1, 3.4, 3.7: all ranks of decode, all lists of blocks; P frees after the last reader."""
    with prefilled(side, machine) as prefill:
        for decode_side in DECODES:
            with decoding(decode_side, machine) as (decode, memories):
                for remote, local, computed in BLOCKS:
                    params = prefill.engine.offer(TOKENS, remote)
                    assert decode.pull(params, TOKENS, local, computed) == set()
                    first = computed // BLOCK_SIZE
                    for memory in memories:
                        expect(memory, decode_side, prefill, local[first:], remote[first:])
                        assert memory.difference() == [], f"decode {decode_side}, {remote}"
                        memory.reset()
                    assert decode.invalid_blocks() == set()
                    assert prefill.engine.let_go() == [params["kvpp"]["transfer_id"]]


def expect(
    memory: KvMemory, side: Side, prefill: Running, local: Sequence[int], remote: Sequence[int]
) -> None:
    """Put down in the image what the pull must have brought."""
    for name in memory.rows:
        memory.expect(name, local, remote, prefill.keepers[name], generation=1)


@pytest.mark.parametrize("side", [side for side in PREFILLS if side.kvpp], ids=str)
def test_a_worker_offers_what_it_keeps_and_no_scratch_memory(side: Side) -> None:
    """3.2, 3.4: also a worker that owns nothing, and drafts whole on every rank of their stage."""
    for _, ranks, placement in side.workers():
        layout = build_layout(placement, PREFILL_BLOCKS)
        buffer = torch.zeros(layout.size, dtype=torch.uint8)
        caches = {
            name: buffer[span.offset : span.end].view(PREFILL_BLOCKS, -1)
            for name, span in layout.components.items()
        }
        regions = cache_regions(kept_rows(caches, planned(caches, layout)))
        assert [region.name for region in regions] == kept(placement)
        scratch_end = buffer.data_ptr() + max(slot.end for slot in layout.slots)
        assert all(region.base >= scratch_end for region in regions)
        sizes = {r.name: r.num_blocks * r.block_bytes for r in regions}
        assert sizes == {name: layout.components[name].size for name in kept(placement)}
        if ranks.pp == side.pp - 1:
            assert {"mtp.attn", "mtp.indexer"} <= set(sizes)


def test_a_cache_whose_blocks_are_in_pieces_is_refused() -> None:
    """3.1: a block that is not dense would be read as its neighbours' bytes."""
    cache = torch.zeros(8, 2, 16)[:, :, :8]
    with pytest.raises(Exception, match=r"a block of 'layers.0.attn' is not in one piece"):
        kept_rows({"layers.0.attn": cache}, planned({"layers.0.attn": cache}))


def resized(name: str, size: int) -> tuple[LayerBundle, ...]:
    """The target layers, one component with another size."""
    return tuple(
        LayerBundle(
            bundle.layer,
            tuple(
                Component(c.name, size if c.name == name else c.bytes_per_block)
                for c in bundle.components
            ),
        )
        for bundle in TARGETS
    )


@pytest.mark.parametrize(
    ("side", "changes", "said"),
    [
        pytest.param(
            Side(split=(4,), targets=TARGETS[:4]),
            {},
            ["layers.4.attn", "none of"],
            id="a layer fewer",
        ),
        pytest.param(Side(drafts=()), {}, ["mtp.attn", "none of"], id="no draft layer"),
        pytest.param(
            Side(targets=resized("layers.3.indexer.scale", 32)),
            {},
            ["layers.3.indexer.scale", "16 bytes here", "32 at"],
            id="other scales",
        ),
        pytest.param(
            Side(), {"block_size": 32}, ["block_size", "16 here", "32 there"], id="other block size"
        ),
        pytest.param(
            Side(),
            {"kv_cache_dtype": "fp8_ds_mla"},
            ["kv_cache_dtype", "bfloat16", "fp8_ds_mla"],
            id="other dtype",
        ),
        pytest.param(
            Side(),
            {"model": MODEL.replace("name=model", "name=other")},
            ["the model's name", "'model' here", "'other' there"],
            id="other model",
        ),
        pytest.param(
            Side(),
            {"model": MODEL.replace("weights=w0", "weights=w1")},
            ["the model's weights", "'w0' here", "'w1' there"],
            id="other weights",
        ),
    ],
)
def test_unlike_sides_are_refused_with_both_values_before_a_byte_moves(
    side: Side, changes: dict[str, object], said: list[str], machine: Machine
) -> None:
    """1.2, 3.1, 3.4: and the lease is released, so that prefill need not wait for its end."""
    with (
        prefilled(side, machine, **changes) as prefill,
        decoding(Side(), machine) as (decode, [memory]),
        listening() as lines,
    ):
        params = prefill.engine.offer(TOKENS, BLOCKS[0][0])
        assert decode.pull(params, TOKENS, BLOCKS[0][1]) == {"incompatible"}
        assert decode.invalid_blocks() == set(BLOCKS[0][1])
        assert decode.invalid_blocks() == set()
        assert memory.difference() == []
        assert prefill.engine.let_go() == [params["kvpp"]["transfer_id"]]
    [line] = [line for line in lines if "incompatible" in line]
    assert all(word in line for word in said), line


@pytest.mark.parametrize(
    ("remote", "local"),
    [
        pytest.param((0, 1, 2, 3, 4, PREFILL_BLOCKS), range(6), id="there"),
        pytest.param(range(6), (0, 1, 2, 3, 4, DECODE_BLOCKS), id="here"),
    ],
)
def test_a_block_outside_its_pool_is_refused_before_a_byte_moves(
    remote: Sequence[int], local: Sequence[int], machine: Machine
) -> None:
    """3.1: a block number that means something else on the other side."""
    with (
        prefilled(Side(), machine) as prefill,
        decoding(Side(), machine) as (decode, [memory]),
    ):
        params = prefill.engine.offer(TOKENS, remote)
        assert decode.pull(params, TOKENS, local) == {"incompatible"}
        assert memory.difference() == []
