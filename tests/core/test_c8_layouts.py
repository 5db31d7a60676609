"""S5: every cache layout of MLA and SFA, quantised or not, is kept and broadcast byte for byte.

All rows of `tests.core.cache_layouts`, in blocks of 128 tokens (Ascend) and of 16 (vLLM on CPU), in
models whose layers are alike and in models that have an indexer in some layers only; and components
that no word is aligned to.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import pairwise, permutations
from unittest import mock

import pytest
import torch

from kvpp_core.bundles import Component, LayerBundle, group_bundles
from kvpp_core.device.cpu import CpuStream
from kvpp_core.errors import LoadFailed
from kvpp_core.group import KvppGroup
from kvpp_core.history import History
from kvpp_core.layout import build_layout
from kvpp_core.policy import BroadcastPolicy, Mode
from kvpp_core.transfer import BundleTransfer
from tests.core.byte_check import Seen, check_step
from tests.core.cache_layouts import MIXES, ROWS, model, tensor_of
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rank_memory import ALIGNED, UNALIGNED, Model
from tests.core.rig import PATIENCE, Rig, make_rig
from tests.grids import grid

NUM_BLOCKS = 5  # odd: a component of an odd size shifts all that follow it to odd addresses
ACTIVE_SETS = ((0, 1, 4), (3,))
BLOCK_SIZES = (16, 128)  # tokens
ALIGNMENTS = (1, 4096)  # bytes
MODES = (Mode.FULL, Mode.RUNS, Mode.PACKED)
POLICIES = (BroadcastPolicy.FULL, BroadcastPolicy.RUNS, BroadcastPolicy.PACKED)

# Every row as a model of its own, and the models that mix a row with its row without indexer.
MODELS: dict[str, Callable[..., Model]] = {
    **{name: partial(model, row) for name, row in ROWS.items()},
    **{f"{name}, mixed": partial(model, ROWS[name], mixed=True) for name in MIXES},
}
# One for each set of components, the widest mixed with its row without indexer.
KINDS = ("MLA", "SFA + LI-C8", "SFA-C8 without indexer", "A5 SFA + LI-C8, mixed")
MODEL = pytest.mark.parametrize("name", grid(MODELS, KINDS.__contains__))
MIX = pytest.mark.parametrize("name", grid(MIXES, ("SFA", "A5 SFA + LI-C8").__contains__))


def run_pipeline(rank: Rank, cache: Model, guard: int = UNALIGNED) -> Seen:
    """Steps in every mode with two sets of active blocks; each rank lists caches its own way."""
    seen, generation = Seen([], []), 1
    r = make_rig(rank, "cpu", model=_relisted(cache, rank), num_blocks=NUM_BLOCKS, guard=guard)
    for policy in POLICIES:
        r.set_policy(policy)
        for active in ACTIVE_SETS:
            generation += 1
            check_step(r, f"{policy}, {active}", active, generation, seen)
    rank.barrier()
    r.close()
    return seen


def _relisted(cache: Model, rank: Rank) -> Model:
    """The bundles as an engine gives them that names its caches in an order of its own."""
    pairs = [(bundle.layer, part) for bundle in cache.bundles for part in bundle.components]
    random.Random(rank.rank).shuffle(pairs)
    return cache._replace(bundles=group_bundles(pairs))


def run_transfers(rank: Rank, cache: Model) -> list[str]:
    """Every bundle in every mode, one by one and without a pipeline."""
    r = make_rig(rank, "cpu", model=cache, num_blocks=NUM_BLOCKS)
    memory, history = r.memory, History.of(ACTIVE_SETS[0], NUM_BLOCKS)
    staging = torch.zeros(sum(memory.placement.slot_bytes_per_block), dtype=torch.uint8)
    stream = CpuStream()
    transfer = BundleTransfer(memory.layout, memory.buffer, staging, r.group, stream)
    found = []
    for mode in MODES:
        for ordinal, bundle in enumerate(cache.bundles):
            for slot in range(2):
                memory.poison_slot(slot)
            transfer.start(ordinal, mode, history, torch.tensor(history.blocks))
            stream.record().wait(PATIENCE)
            if not r.owns(ordinal):
                blocks = range(NUM_BLOCKS) if mode is Mode.FULL else history.blocks
                memory.expect(ordinal, blocks, generation=1)
            found += [f"{mode} of layer {bundle.layer}: {text}" for text in memory.difference()]
    rank.barrier()
    r.close()
    return found


def run_any_order(rank: Rank, cache: Model) -> Seen:
    """Touch the components of every layer in all orders, another one on each rank.

    The first touch must make all components readable, and the others must do nothing.
    """
    seen = Seen([], [])
    r = make_rig(rank, "cpu", model=cache, num_blocks=NUM_BLOCKS)
    most = max(len(bundle.components) for bundle in cache.bundles)
    for turn in range(len(list(permutations(range(most))))):
        generation, active = turn + 2, ACTIVE_SETS[turn % 2]
        touch = partial(_touch, turn + rank.rank, generation, active, seen)
        check_step(r, f"turn {turn}", active, generation, seen, touch)
    rank.barrier()
    r.close()
    return seen


def _touch(
    turn: int, generation: int, active: tuple[int, ...], seen: Seen, r: Rig, ordinal: int
) -> None:
    orders = list(permutations(r.memory.placement.bundles[ordinal].components))
    first, *others = orders[(turn + ordinal) % len(orders)]
    r.pipeline.acquire(first.name)
    read = r.memory.read(ordinal, active)
    seen.bytes.extend(
        f"{first.name} first: {found}"
        for found in r.memory.wrong(ordinal, active, generation, read)
    )
    sent, counted = len(r.group.sent), r.pipeline.stats.snapshot()
    for component in (*others, first):
        r.pipeline.acquire(component.name)
        if len(r.group.sent) != sent or r.pipeline.stats.snapshot() != counted:
            seen.traffic.append(f"{component.name} after {first.name}: did something")


def fail_load_of_any_component(rank: Rank, cache: Model) -> list[str]:
    """The load of a layer with an indexer fails; whichever component is touched says so."""
    r = make_rig(rank, "cpu", model=cache, num_blocks=NUM_BLOCKS)
    said = []
    for order in permutations(r.memory.placement.bundles[3].components):
        fence: Future[None] = Future()
        fence.set_exception(OSError("pool gone"))
        r.pipeline.begin(ACTIVE_SETS[0], {3: fence} if r.owns(3) else None, guarded=True)
        r.forward(1, 0, 3)
        for component in order:
            with pytest.raises(LoadFailed) as failed:
                r.pipeline.acquire(component.name)
            said.append(str(failed.value).split(";")[0])
        r.pipeline.abort()
        r.step(1)
    said += r.complaints()
    rank.barrier()
    r.close()
    return said


def _led_by(lead: int, cache: Model) -> Model:
    """The model with a component of ``lead`` bytes per block in front of every target bundle."""
    bundles = [
        LayerBundle(b.layer, (Component(f"{b.layer}.a_lead", lead), *b.components))
        for b in cache.bundles
    ]
    return cache._replace(bundles=tuple(bundles))


def _shortened(cache: Model) -> Model:
    """The model with rows one byte short: odd sizes, odd strides."""
    bundles = [
        LayerBundle(b.layer, tuple(Component(c.name, c.bytes_per_block - 1) for c in b.components))
        for b in cache.bundles
    ]
    return cache._replace(bundles=tuple(bundles))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_layer_takes_the_bytes_of_its_tensors(name: str, block_size: int) -> None:
    row = ROWS[name]
    cache = model(row, block_size)
    for bundle in (*cache.bundles, *cache.drafts):
        assert bundle.bytes_per_block * 128 == row.bytes * block_size
        assert {c.name.rsplit(".", 1)[1] for c in bundle.components} == set(row.tensors)
        for component in bundle.components:
            expected = tensor_of(row, component.name).bytes(block_size)
            assert component.bytes_per_block == expected


@pytest.mark.parametrize("name", MIXES)
def test_a_mixed_model_has_the_indexer_in_some_layers_and_in_its_draft(name: str) -> None:
    row, other = ROWS[name], "MLA" if ROWS[name].main == "bf16" else "SFA-C8 without indexer"
    cache = model(row, 128, mixed=True)
    sizes = [bundle.bytes_per_block for bundle in (*cache.bundles, *cache.drafts)]
    with_indexer, without = row.bytes, ROWS[other].bytes
    assert sizes == [with_indexer, without, without] * 2 + [with_indexer]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_can_be_viewed_where_it_lies(
    name: str, block_size: int, alignment: int, ranks: int
) -> None:
    """Components follow each other, a scale right behind its data, and all at whole elements."""
    row, cache = ROWS[name.removesuffix(", mixed")], MODELS[name](block_size, alignment=alignment)
    for rank in range(ranks):
        layout = build_layout(cache.placement(ranks, rank), NUM_BLOCKS)
        buffer = torch.empty(layout.size, dtype=torch.int8)
        for bundle in (*cache.bundles, *cache.drafts):
            spans = [layout.components[component.name] for component in bundle.components]
            assert all(left.end == right.offset for left, right in pairwise(spans))
            assert spans[0].offset % alignment == 0
            for component, span in zip(bundle.components, spans, strict=True):
                tensor = tensor_of(row, component.name)
                view = buffer[span.offset : span.end].view(tensor.dtype)
                assert view.data_ptr() == buffer.data_ptr() + span.offset
                assert view.numel() == NUM_BLOCKS * block_size * tensor.elements


@MODEL
def test_two_ranks_hold_the_owners_bytes(world2: GlooWorld, name: str) -> None:
    assert world2.run(run_pipeline, MODELS[name](16)) == [Seen([], [])] * 2


@MODEL
def test_four_ranks_hold_the_owners_bytes(world4: GlooWorld, name: str) -> None:
    cache = MODELS[name](128, alignment=4096)
    assert world4.run(run_pipeline, cache) == [Seen([], [])] * 4


@MODEL
def test_each_mode_alone_moves_each_bundle(world4: GlooWorld, name: str) -> None:
    assert world4.run(run_transfers, MODELS[name](16)) == [[]] * 4


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize(
    "name", grid(["SFA-C8 + LI-C8, mixed", "A5 SFA + LI-C8, mixed"], lambda n: n[0] == "A")
)
@pytest.mark.parametrize("lead", [1, 2, 3, 4])
def test_components_that_no_word_is_aligned_to(
    world2: GlooWorld, name: str, alignment: int, lead: int
) -> None:
    """Scales and rows at odd addresses, at multiples of 2 but not of 4, and of 4 but not of 8."""
    cache = _led_by(lead, MODELS[name](16, alignment=alignment))
    layout = build_layout(cache.placement(2, 0), NUM_BLOCKS)
    odd = {layout.components[c.name].offset % 8 for b in cache.bundles for c in b.components}
    assert lead * NUM_BLOCKS % 8 in odd
    for guard in (ALIGNED, UNALIGNED):
        assert world2.run(run_pipeline, cache, guard) == [Seen([], [])] * 2


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@MIX
def test_components_of_odd_sizes(world4: GlooWorld, name: str, alignment: int) -> None:
    cache = _shortened(model(ROWS[name], 16, mixed=True, alignment=alignment))
    assert all(c.bytes_per_block % 2 for b in cache.bundles for c in b.components)
    assert world4.run(run_pipeline, cache, ALIGNED) == [Seen([], [])] * 4


@pytest.mark.parametrize(("base", "word"), enumerate((8, 1, 2, 1, 4, 1, 2, 1)))
def test_rows_are_copied_in_words_only_where_words_are_aligned(base: int, word: int) -> None:
    """Also when the memory itself starts at any byte: an accelerator faults on other words."""
    cache = MODELS["SFA-C8 + LI-C8"](16)
    layout = build_layout(cache.placement(2, 0), NUM_BLOCKS)
    memory, staging = (_memory_at(base, size) for size in (layout.size, 1 << 20))
    group = mock.Mock(spec=KvppGroup, rank=0, ranks=(0, 1))
    transfer = BundleTransfer(layout, memory, staging, group, CpuStream())
    blocks = History.of(ACTIVE_SETS[0], NUM_BLOCKS)
    with mock.patch.object(torch, "index_select", wraps=torch.index_select) as gather:
        transfer.start(0, Mode.PACKED, blocks, torch.tensor(blocks.blocks))
    assert gather.call_count == len(cache.bundles[0].components)
    for call in gather.call_args_list:
        assert call.args[0].element_size() == call.kwargs["out"].element_size() == word


def _memory_at(base: int, size: int) -> torch.Tensor:
    """Bytes whose storage starts at an address that is ``base`` modulo 8."""
    whole = bytearray(size + 16)
    start = -torch.frombuffer(whole, dtype=torch.uint8).data_ptr() % 8 + base
    return torch.frombuffer(whole, dtype=torch.uint8, count=size, offset=start)


@MODEL
def test_the_components_of_a_layer_may_be_touched_in_any_order(
    world2: GlooWorld, name: str
) -> None:
    assert world2.run(run_any_order, MODELS[name](16)) == [Seen([], [])] * 2


@MIX
def test_a_failed_load_is_raised_by_whichever_component_comes_first(
    world2: GlooWorld, name: str
) -> None:
    cache = model(ROWS[name], 16, mixed=True)
    parts = len(ROWS[name].tensors)
    orders = len(list(permutations(range(parts))))
    expected = ["the load of layer 3 failed on its owner, rank 1"] * (orders * parts)
    assert world2.run(fail_load_of_any_component, cache) == [expected] * 2
