"""The ranks of one KVPP group as process groups.

Broadcasts run on a group of their own, beside the engine's: the ``data`` group carries cache
bytes, the ``control`` group (host memory) carries manifests and load status, so that the two never
depend on each other's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from kvpp_core.device.base import Work
from kvpp_core.errors import KvppError, PlanError

__all__ = ["KvppGroup", "make_group"]

MAX_GATHERED_BYTES = 64 << 20  # a manifest of 1,000 layers takes well under 1 MiB


@dataclass(frozen=True, slots=True)
class KvppGroup:
    """One rank's end of a KVPP group. ``ranks`` are global ranks in group order."""

    ranks: tuple[int, ...]
    rank: int  # this process's group rank
    data: dist.ProcessGroup
    control: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def backend(self) -> str:
        """Name of the data group's backend: gloo, nccl, hccl."""
        return dist.get_backend(self.data)

    def broadcast(self, tensor: torch.Tensor, owner: int) -> dist.Work:
        """Start the broadcast of ``tensor`` (contiguous) from group rank ``owner``."""
        return _started(dist.broadcast(tensor, self.ranks[owner], group=self.data, async_op=True))

    def broadcast_control(self, tensor: torch.Tensor, owner: int) -> Work:
        """Start the broadcast of a small host tensor on the control group."""
        return _started(
            dist.broadcast(tensor, self.ranks[owner], group=self.control, async_op=True)
        )

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload in group order. Collective, on the control group.

        Raises:
            KvppError: a rank announces more than MAX_GATHERED_BYTES.
        """
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        dist.all_gather(sizes, torch.tensor([len(payload)]), group=self.control)
        longest = max(int(size) for size in sizes)
        if longest > MAX_GATHERED_BYTES:
            raise KvppError(f"a rank of the group sent {longest:,} bytes of facts; expected less")
        mine = torch.frombuffer(
            bytearray(payload.ljust(longest, b"\0") or b"\0"), dtype=torch.uint8
        )
        parts = [torch.zeros_like(mine) for _ in self.ranks]
        dist.all_gather(parts, mine, group=self.control)
        # torch gathers in the order of global ranks, not in that of the group's list.
        gathered = {
            rank: part[: int(size)].numpy().tobytes()
            for rank, part, size in zip(sorted(self.ranks), parts, sizes, strict=True)
        }
        return [gathered[rank] for rank in self.ranks]

    def close(self) -> None:
        """Destroy both process groups. No collective may be under way."""
        for group in (self.data, self.control):
            dist.destroy_process_group(group)


def make_group(
    all_groups: Sequence[Sequence[int]],
    global_rank: int,
    backend: str,
    timeout: float,
) -> KvppGroup:
    """Create the process groups of every KVPP group, and return this rank's.

    Every rank of the world must call this with the same ``all_groups`` (global ranks): ranks that
    each create only their own group would exchange data with wrong peers, silently. ``timeout``
    (seconds) bounds each collective.

    Raises:
        PlanError: this rank is in no group, or in two.
    """
    mine: list[KvppGroup] = []
    for ranks in all_groups:
        groups = [
            dist.new_group(list(ranks), backend=name, timeout=timedelta(seconds=timeout))
            for name in (backend, "gloo")
        ]
        if global_rank in ranks:
            mine.append(KvppGroup(tuple(ranks), list(ranks).index(global_rank), *groups))
    if len(mine) != 1:
        raise PlanError(f"rank {global_rank} is in {len(mine)} KVPP groups of {list(all_groups)}")
    return mine[0]


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:  # torch returns None to a process outside the group
        raise KvppError("this process is not in the group that it broadcasts to")
    return work
