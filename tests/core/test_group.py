"""The process groups of KVPP: who is in which, and small facts exchanged on the host."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kvpp_core import group as group_module
from kvpp_core.errors import KvppError, PlanError
from kvpp_core.group import make_group
from tests.core.gloo_world import GlooWorld, Rank

TIMEOUT = 30.0  # seconds
PAYLOADS = ((b"", b""), (b"", b"x"), (b"\0\xff" * 1000, b"\0"), (b"a", b"b"))


def gather(rank: Rank) -> list[list[bytes]]:
    """Payloads of different lengths, empty ones and binary ones, in a group made as [1, 0]."""
    group = make_group([[1, 0]], rank.rank, "gloo", TIMEOUT)
    gathered = [group.all_gather_bytes(pair[group.rank]) for pair in PAYLOADS]
    rank.barrier()
    group.close()
    return gathered


def gather_too_much(rank: Rank) -> str:
    """Rank 1 announces more than may be sent; then both exchange something small."""
    group = make_group([[0, 1]], rank.rank, "gloo", TIMEOUT)
    with (
        mock.patch.object(group_module, "MAX_GATHERED_BYTES", 99),
        pytest.raises(KvppError) as error,
    ):
        group.all_gather_bytes(b"x" * (100 if rank.rank else 1))
    assert group.all_gather_bytes(b"y") == [b"y", b"y"]
    rank.barrier()
    group.close()
    return str(error.value)


def broadcast_on_both(rank: Rank) -> list[list[int]]:
    """Start on the data group first on rank 0, on the control group first on rank 1."""
    group = make_group([[0, 1]], rank.rank, "gloo", TIMEOUT)
    data, control = (torch.full((3,), 10 * kind + rank.rank) for kind in (1, 2))
    starts = [lambda: group.broadcast(data, 1), lambda: group.broadcast_control(control, 0)]
    for work in [start() for start in (reversed(starts) if rank.rank else starts)]:
        work.wait()
    assert (group.size, group.backend) == (2, "gloo")
    rank.barrier()
    group.close()
    return [data.tolist(), control.tolist()]


def misplaced(rank: Rank) -> list[str]:
    """Ask for groups that leave rank 1 out, or have rank 0 twice."""
    said = []
    for groups in ([[0]], [[0, 1], [0]]):
        try:
            make_group(groups, rank.rank, "gloo", TIMEOUT)
            said.append("")
        except PlanError as error:
            said.append(str(error))
    rank.barrier()
    return said


def test_payloads_of_any_length_arrive_in_group_order(world2: GlooWorld) -> None:
    """Also where group order is not the order of global ranks, in which torch gathers."""
    expected = [list(pair) for pair in PAYLOADS]
    assert world2.run(gather) == [expected, expected]


def test_a_rank_that_announces_too_much_is_refused_by_all_before_it_is_sent(
    world2: GlooWorld,
) -> None:
    said = world2.run(gather_too_much)
    assert said[0] == said[1]
    assert "sent 100 bytes of facts" in said[0]


def test_data_and_control_do_not_depend_on_each_others_order(world2: GlooWorld) -> None:
    assert world2.run(broadcast_on_both) == [[[11] * 3, [20] * 3]] * 2


def test_a_rank_outside_all_groups_or_in_two_is_refused(world2: GlooWorld) -> None:
    said = world2.run(misplaced)
    assert said[0] == ["", "rank 0 is in 2 KVPP groups of [[0, 1], [0]]"]
    assert said[1] == ["rank 1 is in 0 KVPP groups of [[0]]", ""]
