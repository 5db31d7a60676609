"""KVPP groups beside each other: TP x PCP ranks of every DP replica and PP stage.

vLLM on CPU has no PCP, so its groups are made here as the engine makes them, over plain processes:
who is in which, and that groups that work at the same time, at different paces and on different
caches, never meet.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import chain
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from kvpp_connectors.engine import groups
from kvpp_core.device.base import Work
from kvpp_core.errors import ManifestMismatch
from kvpp_core.group import KvppGroup
from kvpp_core.manifest import Manifest, agree
from kvpp_core.policy import BroadcastPolicy
from tests.core.byte_check import Seen, check_step, check_step_without_history
from tests.core.cache_layouts import ROWS, model
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rank_memory import POISON, Model, pattern, uneven_model
from tests.core.rig import ACTIVE, NUM_BLOCKS, PATIENCE, make_rig

POLICIES = list(BroadcastPolicy)
IN_FLIGHT = 3  # raw broadcasts that a group has under way at the same time


class Place(NamedTuple):
    """Where a rank stands in a grid."""

    dp: int
    pp: int
    pcp: int
    tp: int


class Grid(NamedTuple):
    """Sizes of the parallel axes, slowest first."""

    dp: int = 1
    pp: int = 1
    pcp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """Ranks of the world."""
        return self.dp * self.pp * self.pcp * self.tp

    @property
    def groups(self) -> list[list[int]]:
        """The KVPP groups of the world."""
        return groups.all_groups(self.size, self.tp, self.pcp)

    def place(self, rank: int) -> Place:
        """Where vLLM puts a global rank: tp is the fastest axis."""
        rest, tp = divmod(rank, self.tp)
        rest, pcp = divmod(rest, self.pcp)
        dp, pp = divmod(rest, self.pp)
        return Place(dp, pp, pcp, tp)

    def group_of(self, rank: int) -> int:
        """Which of the KVPP groups a global rank is in: one for every replica and stage."""
        place = self.place(rank)
        return place.dp * self.pp + place.pp


ONE_REPLICA = (Grid(pcp=2, tp=2), Grid(pcp=4))
TWO_GROUPS_OF_TWO = (Grid(dp=2, pcp=2), Grid(pp=2, pcp=2), Grid(dp=2, tp=2))
TWO_GROUPS_OF_FOUR = (
    Grid(dp=2, pcp=2, tp=2),
    Grid(pp=2, pcp=2, tp=2),
    Grid(dp=2, pcp=4),
    Grid(pp=2, pcp=4),
)
EIGHT_RANKS = (*TWO_GROUPS_OF_FOUR, Grid(dp=2, pp=2, pcp=2))
ALL_GRIDS = (*ONE_REPLICA, *TWO_GROUPS_OF_TWO, *EIGHT_RANKS)


eight_processes = pytest.mark.process  # more than the cores of most machines


@pytest.fixture(scope="module")
def world8() -> Iterator[GlooWorld]:
    """Eight ranks."""
    world = GlooWorld(8)
    yield world
    world.close()


def make_engine_group(rank: Rank, grid: Grid) -> tuple[tuple[int, ...], int, str]:
    """What the engine's own call gives a rank."""
    group = groups.create(grid.tp, grid.pcp, torch.device("cpu"), PATIENCE)
    made = group.ranks, group.rank, group.backend
    rank.barrier()
    group.close()
    return made


def run_broadcasts(rank: Rank, grid: Grid, counts: Sequence[int]) -> list[str]:
    """Every group sends its own number of messages, of its own sizes, as fast as it likes."""
    index = grid.group_of(rank.rank)
    group = groups.create(grid.tp, grid.pcp, torch.device("cpu"), PATIENCE)
    sizes, pace = random.Random(index), random.Random(rank.rank)
    found: list[str] = []
    for first in range(0, counts[index], IN_FLIGHT):
        time.sleep(pace.uniform(0, 0.004))
        numbers = range(first, min(first + IN_FLIGHT, counts[index]))
        messages = [_message(group, index, number, sizes.randint(1, 50_000)) for number in numbers]
        for message in messages:
            message.work.wait()
            found += message.wrong()
    rank.barrier()
    group.close()
    return found


class _Message(NamedTuple):
    """A broadcast under way: even ones on the data group, odd ones on the control group."""

    name: str
    tensor: torch.Tensor
    expected: torch.Tensor
    work: Work

    def wrong(self) -> list[str]:
        equal = torch.equal(self.tensor, self.expected)
        return [] if equal else [f"{self.name}: {self.tensor[:8].tolist()}"]


def _message(group: KvppGroup, index: int, number: int, size: int) -> _Message:
    owner, name = number % group.size, f"message {number} of group {index}"
    expected = pattern(name, number, owner, index, size)
    tensor = expected.clone() if owner == group.rank else torch.full_like(expected, POISON)
    broadcast = group.broadcast_control if number % 2 else group.broadcast
    return _Message(name, tensor, expected, broadcast(tensor, owner))


def run_replicas(rank: Rank, grid: Grid, counts: Sequence[int], dummies: int = 0) -> Seen:
    """Every group runs its own number of steps, on a model of its stage, at its own pace.

    A group without steps runs ``dummies`` forwards without history, as a replica without requests.
    When all have ended, each group takes one more step.
    """
    index, place = grid.group_of(rank.rank), grid.place(rank.rank)
    r = make_rig(rank, "cpu", model=_stage(place.pp), groups=grid.groups)
    seen = _out_of_place(r.group, grid, rank)
    draw, pace = random.Random(index), random.Random(rank.rank)

    def step(number: int) -> None:
        r.set_policy(draw.choice(POLICIES))
        active = sorted(draw.sample(range(NUM_BLOCKS), draw.randint(1, NUM_BLOCKS)))
        name = f"group {index}, step {number} ({r.settings.policy}, {active})"
        check_step(r, name, active, 1000 * (index + 1) + number, seen)

    for number in range(counts[index]):
        time.sleep(pace.uniform(0, 0.004))
        step(number)
    for _ in range(0 if counts[index] else dummies):
        check_step_without_history(r, f"group {index}, idle", seen)
    rank.barrier()
    seen.bytes.extend(f"group {index}, when all had ended: {f}" for f in r.memory.difference())
    step(counts[index])
    if r.pipeline.stats.steps_with_history != counts[index] + 1:
        seen.traffic.append(f"group {index}: {r.pipeline.stats.steps_with_history} steps")
    rank.barrier()
    r.close()
    return seen


def _stage(pp: int) -> Model:
    """Stages differ in layers and in sizes."""
    return uneven_model(5) if pp == 0 else model(ROWS["SFA + LI-C8"], 16, 7, mixed=True)


def _out_of_place(group: KvppGroup, grid: Grid, rank: Rank) -> Seen:
    place = grid.place(rank.rank)
    right = group.rank == place.pcp * grid.tp + place.tp and group.ranks[group.rank] == rank.rank
    return Seen([], [] if right else [f"{place} has group rank {group.rank} of {group.ranks}"])


def run_beside_a_stalled_replica(rank: Rank, grid: Grid, stalled: int) -> tuple[list[str], float]:
    """One group stops inside a step until every rank of the other has run all of its own.

    Returns what was read wrong, and when (seconds) this rank's steps had ended.
    """
    index = grid.group_of(rank.rank)
    r = make_rig(rank, "cpu", model=uneven_model(8), groups=grid.groups)
    stopper, token = grid.groups[stalled][-1], torch.zeros(1)
    if index == stalled:
        r.pipeline.begin(ACTIVE)
        r.forward(1, 0, 2)
        if rank.rank == stopper:  # it owns layers 6 and 7: nobody of its group gets past them
            for runner in grid.groups[1 - stalled]:
                dist.recv(token, runner)
        r.forward(1, 2)
        r.pipeline.end()
    else:
        for _ in range(5):
            r.step(1)
    ended = time.monotonic()
    if index != stalled:
        dist.send(token, stopper)
    found = r.complaints()
    rank.barrier()
    r.close()
    return found, ended


def run_agreements(rank: Rank, grid: Grid, odd: int | None) -> str:
    """Each group checks the manifest of its own stage; global rank ``odd`` has another one."""
    group = groups.create(grid.tp, grid.pcp, torch.device("cpu"), PATIENCE)
    placement = _stage(grid.place(rank.rank).pp).placement(group.size, group.rank)
    block_size = 32 if rank.rank == odd else 16
    manifest = Manifest(group.size, block_size, "auto", placement.bundles, placement.owners)
    said = manifest.digest()
    try:
        agree(manifest, {}, group.ranks, group.all_gather_bytes)
    except ManifestMismatch as error:
        said = str(error)
    rank.barrier()
    group.close()
    return said


def _vllm_groups(monkeypatch: pytest.MonkeyPatch, grid: Grid) -> dict[str, list[list[int]]]:
    """The groups that vLLM itself would make in a world of the grid's size, by name."""
    state, config = import_module("vllm.distributed.parallel_state"), mock.MagicMock()
    made: dict[str, list[list[int]]] = {}

    def note(ranks: list[list[int]], *_: object, group_name: str, **__: object) -> mock.Mock:
        made[group_name] = ranks
        return mock.Mock(rank_in_group=0)

    config.parallel_config.data_parallel_size = grid.dp
    config.parallel_config.enable_elastic_ep = config.parallel_config.enable_eplb = False
    config.engram_config = None
    for name in ("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB"):
        monkeypatch.setattr(state, name, None)
    monkeypatch.setattr(state, "init_model_parallel_group", note)
    monkeypatch.setattr(state, "get_world_group", mock.Mock())
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: config)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: grid.size)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    state.initialize_model_parallel(grid.tp, grid.pp, grid.pcp, backend="gloo")
    return made


@pytest.mark.parametrize("grid", ALL_GRIDS, ids=str)
def test_a_group_is_the_tp_x_pcp_ranks_of_one_replica_and_stage(grid: Grid) -> None:
    for index, ranks in enumerate(grid.groups):
        places = [grid.place(rank) for rank in ranks]
        assert [place.pcp * grid.tp + place.tp for place in places] == list(range(len(ranks)))
        assert len(ranks) == grid.pcp * grid.tp
        assert {place[:2] for place in places} == {divmod(index, grid.pp)}
    assert sorted(chain.from_iterable(grid.groups)) == list(range(grid.size))


@pytest.mark.parametrize("grid", ALL_GRIDS, ids=str)
def test_group_ranks_are_those_of_vllms_own_tp_and_pcp_groups(
    monkeypatch: pytest.MonkeyPatch, grid: Grid
) -> None:
    made = _vllm_groups(monkeypatch, grid)
    tp, pcp = ({r: ranks for ranks in made[name] for r in ranks} for name in ("tp", "pcp"))
    for ranks in grid.groups:
        assert set(ranks) == {rank for peer in tp[ranks[0]] for rank in pcp[peer]}
        for group_rank, rank in enumerate(ranks):
            assert group_rank == pcp[rank].index(rank) * grid.tp + tp[rank].index(rank)


@pytest.mark.parametrize("grid", [*ONE_REPLICA, *TWO_GROUPS_OF_TWO], ids=str)
def test_broadcasts_of_four_ranks_stay_in_their_groups(world4: GlooWorld, grid: Grid) -> None:
    assert world4.run(run_broadcasts, grid, [40, 25]) == [[]] * 4


@pytest.mark.parametrize("grid", [*ONE_REPLICA, *TWO_GROUPS_OF_TWO], ids=str)
def test_pipelines_of_four_ranks_hold_their_own_owners_bytes(world4: GlooWorld, grid: Grid) -> None:
    assert world4.run(run_replicas, grid, [12, 7]) == [Seen([], [])] * 4


@eight_processes
@pytest.mark.parametrize("grid", EIGHT_RANKS, ids=str)
def test_the_engine_makes_the_groups_of_all_replicas_and_stages(
    world8: GlooWorld, grid: Grid
) -> None:
    assert world8.run(make_engine_group, grid) == [
        (tuple(ranks), group_rank, "gloo")
        for ranks in grid.groups
        for group_rank in range(len(ranks))
    ]


@eight_processes
@pytest.mark.parametrize("grid", EIGHT_RANKS, ids=str)
def test_broadcasts_of_eight_ranks_stay_in_their_groups(world8: GlooWorld, grid: Grid) -> None:
    assert world8.run(run_broadcasts, grid, [28, 48, 16, 36]) == [[]] * 8


@eight_processes
@pytest.mark.parametrize("grid", EIGHT_RANKS, ids=str)
def test_pipelines_of_eight_ranks_hold_their_own_owners_bytes(
    world8: GlooWorld, grid: Grid
) -> None:
    assert world8.run(run_replicas, grid, [7, 12, 4, 9]) == [Seen([], [])] * 8


@eight_processes
@pytest.mark.parametrize("dummies", [0, 20])
@pytest.mark.parametrize("counts", [(0, 40), (40, 0)])
@pytest.mark.parametrize("grid", TWO_GROUPS_OF_FOUR[:2], ids=str)
def test_a_replica_without_work_does_not_hold_up_or_hear_the_other(
    world8: GlooWorld, grid: Grid, counts: tuple[int, int], dummies: int
) -> None:
    assert world8.run(run_replicas, grid, counts, dummies) == [Seen([], [])] * 8


@eight_processes
@pytest.mark.parametrize("stalled", [0, 1])
def test_a_replica_that_stops_inside_a_step_does_not_hold_up_the_other(
    world8: GlooWorld, stalled: int
) -> None:
    grid = Grid(dp=2, pcp=2, tp=2)
    results = world8.run(run_beside_a_stalled_replica, grid, stalled)
    assert [found for found, _ in results] == [[]] * 8
    ends = [[results[rank][1] for rank in ranks] for ranks in grid.groups]
    assert max(ends[1 - stalled]) < min(ends[stalled])


@eight_processes
def test_every_stage_agrees_on_its_own_manifest(world8: GlooWorld) -> None:
    said = world8.run(run_agreements, Grid(dp=1, pp=2, pcp=2, tp=2), None)
    assert len({*said[:4]}) == len({*said[4:]}) == 1
    assert said[0] != said[4]


@eight_processes
def test_replicas_of_one_model_have_one_digest_and_a_mismatch_stays_in_its_group(
    world8: GlooWorld,
) -> None:
    said = world8.run(run_agreements, Grid(dp=2, pcp=2, tp=2), 6)
    assert len({*said[:4]}) == len({*said[4:]}) == 1
    assert "KVPP group [4, 5, 6, 7] do not agree on manifest.block_size" in said[4]
    assert "rank 4 has 16, rank 6 has 32" in said[4]
    assert len(said[0]) == 64
