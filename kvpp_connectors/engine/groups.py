"""The KVPP group of a worker: the TP x PCP ranks of one DP replica and PP stage."""

from __future__ import annotations

import torch
import torch.distributed as dist

from kvpp_core.group import KvppGroup, make_group

__all__ = ["all_groups", "create"]


def all_groups(world_size: int, tp: int, pcp: int) -> list[list[int]]:
    """Global ranks of every KVPP group.

    vLLM numbers ranks as (dp, pp, pcp, tp) with tp fastest, so that a group is a run of ranks and
    its group rank is ``pcp_rank * tp_size + tp_rank``.
    """
    size = tp * pcp
    return [list(range(first, first + size)) for first in range(0, world_size, size)]


def create(tp: int, pcp: int, device: torch.device, timeout: float) -> KvppGroup:
    """Create the groups of all replicas and stages, and warm this one up. Collective.

    The warm-up lets a communicator allocate its buffers before vLLM measures free memory, so that
    they are counted.
    """
    backend = "gloo" if device.type == "cpu" else dist.get_backend()
    groups = all_groups(dist.get_world_size(), tp, pcp)
    group = make_group(groups, dist.get_rank(), backend, timeout)
    group.broadcast(torch.zeros(1, dtype=torch.int8, device=device), 0).wait()
    return group
