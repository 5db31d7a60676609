"""The cost model's constants: measured over real gloo groups, the same on every rank."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_core import calibration
from kvpp_core.calibration import measure_costs
from kvpp_core.device import CpuDevice
from kvpp_core.group import make_group
from kvpp_core.policy import CostModel, Mode
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rig import PATIENCE


def measure_and_compare(rank: Rank) -> None:
    group = make_group([range(rank.size)], rank.rank, "gloo", PATIENCE)
    device = CpuDevice(PATIENCE)
    cost = measure_costs(group, device, "cpu", PATIENCE)
    said = group.all_gather_bytes(repr(cost).encode())
    assert len(set(said)) == 1, said
    assert 0 < cost.latency < 1 and 0 < cost.per_range < 1
    assert 1e6 < cost.bandwidth < 1e13
    assert cost.pack_bandwidth > 1e6  # on a busy machine packing may come out as free
    rank.barrier()
    group.close()


def test_every_rank_arrives_at_the_same_constants(world4: GlooWorld) -> None:
    world4.run(measure_and_compare)


def slow_on_rank_1(rank: Rank) -> None:
    """What one rank alone finds slow counts for all."""
    group = make_group([range(2)], rank.rank, "gloo", PATIENCE)
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            quickest = calibration._quickest
            patch.setattr(calibration, "_quickest", lambda *a: quickest(*a) + 0.5)
        cost = measure_costs(group, CpuDevice(PATIENCE), "cpu", PATIENCE)
    assert cost.latency > 0.4
    assert len(set(group.all_gather_bytes(repr(cost).encode()))) == 1
    rank.barrier()
    group.close()


def test_the_slowest_rank_counts(world2: GlooWorld) -> None:
    world2.run(slow_on_rank_1)


@given(
    latency=st.floats(1e-5, 1e-2),
    per_range=st.floats(1e-5, 1e-2),
    bandwidth=st.floats(1e8, 1e11),
    pack_bandwidth=st.floats(1e8, 1e11),
)
def test_the_constants_are_those_that_give_the_measured_times(**constants: float) -> None:
    cost = CostModel(**constants)
    block = calibration._BLOCK_BYTES
    half = len(calibration._SCATTERED) * block
    found = calibration._fit(
        {
            "one": cost.seconds(Mode.RUNS, block, 1),
            "many": cost.seconds(Mode.RUNS, calibration._RUNS * block, calibration._RUNS),
            "full": cost.seconds(Mode.FULL, calibration._BLOCKS * block, 1),
            "packed": cost.seconds(Mode.PACKED, half, 1),
        }
    )
    assert asdict(found) == pytest.approx(asdict(cost), rel=1e-2)
