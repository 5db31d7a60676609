"""S12: transfers are checked byte for byte, with sentinels around the payload.

A broadcast over two real gloo ranks, a pull over real Transfer Engines, and a pool's save and load
bring what they should, and nothing else changes. Then one of them is made wrong in one way, and the
same check must see it: so a wrong byte anywhere would be seen. Injected: flipped first and last
bytes, payload that is lost, cut, too long, shifted, in another block, come twice. The large grids
are in tests/p2p/test_byte_grid.py, tests/core/test_broadcast_bytes.py and tests/pool. Field reports
3.1, 3.4.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvpp_connectors.connector.transfer_engine import Read
from kvpp_connectors.p2p.read_window import ReadEngine
from kvpp_connectors.pool.block_objects import HEADER_BYTES, BlockStore, Staging
from kvpp_connectors.pool.packing import CacheBlocks, Inventory
from kvpp_connectors.pool.store.base import Buffer, Store, StoreOutcome
from kvpp_core.policy import BroadcastPolicy
from tests.core.byte_check import Seen
from tests.core.gloo_world import GlooWorld
from tests.core.rank_memory import RankMemory
from tests.core.rig import MODES
from tests.core.wrong_broadcasts import BROADCASTS, broadcast
from tests.p2p.conftest import Machine
from tests.p2p.pull_rig import rig
from tests.pool.block_stores import LAYERS, RANKS, objects
from tests.pool.stores import MemCacheStandInStore, StoreUnderTest
from tests.pool.test_packing import caches_of, expected, memory_of
from tests.safety.faulty_store import FaultyStore


@pytest.mark.parametrize("policy", MODES)
def test_a_broadcast_changes_what_it_should_and_no_other_byte(
    world2: GlooWorld, policy: BroadcastPolicy
) -> None:
    assert world2.run(broadcast, policy, None) == [Seen([], [])] * 2


@pytest.mark.parametrize("wrong", BROADCASTS)
def test_twin_a_broadcast_that_goes_wrong_is_seen(world2: GlooWorld, wrong: str) -> None:
    sender, receiver = world2.run(broadcast, BroadcastPolicy.RUNS, wrong)
    assert sender == Seen([], [])
    assert receiver.bytes and receiver.bytes[0].startswith("step, layer 0: ")


# Pulls: what happens to the second read ---------------------------------------------------------

READS: dict[str, Callable[[Read], Read | None]] = {
    "lost": lambda read: None,
    "cut": lambda read: replace(read, size=read.size - 1),
    "too long": lambda read: replace(read, size=read.size + 1),
    "from a byte before": lambda read: replace(read, remote=read.remote - 1),
    "from the next block": lambda read: replace(read, remote=read.remote + read.size),
    "to a byte behind": lambda read: replace(read, local=read.local + 1),
    "to the block before": lambda read: replace(read, local=read.local - read.size),
}


class BentReads:
    """A real engine that does its second read wrong and says that all went well."""

    def __init__(self, engine: ReadEngine, bend: Callable[[Read], Read | None]) -> None:
        self._engine, self._bend = engine, bend
        self._numbers = itertools.count()

    def start_read(self, read: Read) -> int | None:
        """Submit what becomes of it."""
        bent = self._bend(read) if next(self._numbers) == 1 else read
        return -1 if bent is None else self._engine.start_read(bent)

    def poll(self, handle: int) -> bool | None:
        """As the engine."""
        return True if handle == -1 else self._engine.poll(handle)


@pytest.mark.parametrize("twice", [False, True], ids=["", "twice"])
def test_a_pull_changes_what_it_should_and_no_other_byte(machine: Machine, twice: bool) -> None:
    with rig(machine) as both:
        assert all(both.now(name).reason == "ok" for name in ("a", "b")[: 1 + twice])
        both.assert_pulled()


@pytest.mark.parametrize("wrong", READS)
def test_twin_a_pull_that_goes_wrong_is_seen(machine: Machine, wrong: str) -> None:
    with rig(machine, through=lambda engine: BentReads(engine, READS[wrong])) as both:
        assert both.now("a").reason == "ok"
        with pytest.raises(AssertionError):
            both.assert_pulled()


# Pools: what happens to an object's pieces after a load ----------------------------------------

PIECES: dict[str, Callable[[Buffer], None]] = {
    "first byte": lambda found: _write(found.addresses[1]),
    "last byte": lambda found: _write(found.addresses[-1] + found.sizes[-1] - 1),
    "a byte before": lambda found: _write(found.addresses[1] - 1),
    "a byte behind": lambda found: _write(found.addresses[-1] + found.sizes[-1]),
    "in a block's middle": lambda found: _write(found.addresses[2] + found.sizes[2] // 2),
}


def _write(address: int) -> None:
    byte = ctypes.c_ubyte.from_address(address)
    byte.value ^= 1


class BentLoads(FaultyStore):
    """A backend whose loads leave one wrong byte and say that all went well."""

    def __init__(self, backend: Store, wrong: str) -> None:
        super().__init__(backend)
        self._wrong = PIECES[wrong]

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        """Load, and then go wrong."""
        outcomes = super().get(keys, buffers)
        self._wrong(buffers[0])
        return outcomes


def saved_and_loaded(backend: Store, prefix: str) -> tuple[RankMemory, list[StoreOutcome]]:
    """Blocks of rank 0 through a store, into memory that held others."""
    source, target = memory_of(LAYERS, RANKS, 0), memory_of(LAYERS, RANKS, 0)
    for ordinal in target.placement.owned:
        target.store(ordinal, generation=2)
    wanted = objects(prefix, [4, 0, 3])
    ended = []
    for memory, move in ((source, BlockStore.save), (target, BlockStore.load)):
        blocks = CacheBlocks(caches_of(memory), Inventory.kept(memory.placement))
        ended += move(BlockStore(backend, blocks, Staging(backend, 1 << 20)), wanted)
    for ordinal in target.placement.owned:
        target.expect(ordinal, [4, 0, 3], generation=1)
    return target, ended


def test_a_save_and_a_load_move_what_they_should_and_no_other_byte(
    store: StoreUnderTest, prefix: str
) -> None:
    """The object's own bytes, too."""
    target, ended = saved_and_loaded(store.backend, prefix)
    assert all(outcome.ok for outcome in ended)
    assert target.difference() == []
    for block in (4, 0, 3):
        wanted = expected(Inventory.kept(target.placement), block, writer=0)
        assert store.read(f"{prefix}{block}")[HEADER_BYTES:] == wanted.numpy().tobytes()


@pytest.mark.parametrize("wrong", PIECES)
def test_twin_a_load_that_goes_wrong_is_seen(wrong: str, tmp_path: Path) -> None:
    store = BentLoads(MemCacheStandInStore(tmp_path).backend, wrong)
    target, ended = saved_and_loaded(store, "kvpp1@bent@")
    assert all(outcome.ok for outcome in ended)
    assert target.difference()
