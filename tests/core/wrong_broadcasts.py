"""A broadcast that goes wrong in one way, and what the byte check sees of it.

In a module of its own, because spawned ranks import it: it needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from kvpp_core.policy import BroadcastPolicy
from tests.core.byte_check import Seen, check_step
from tests.core.gloo_world import Rank
from tests.core.rank_memory import uneven_model
from tests.core.rig import ACTIVE, Rig, make_rig

__all__ = ["BROADCASTS", "broadcast"]

Rows = list[torch.Tensor]  # of each component, (blocks, bytes)


def _flip(place: torch.Tensor) -> None:
    place.bitwise_xor_(1)


# What happens to layer 0 at its receiver, right after it has come.
BROADCASTS: dict[str, Callable[[Rig, Rows], object]] = {
    "first byte": lambda r, rows: _flip(rows[0][ACTIVE[0], :1]),
    "last byte": lambda r, rows: _flip(rows[-1][ACTIVE[-1], -1:]),
    "lost": lambda r, rows: rows[1][ACTIVE[1]].fill_(0xFF),
    "another block's": lambda r, rows: rows[0][ACTIVE[0]].copy_(rows[0][ACTIVE[1]]),
    "a block too many": lambda r, rows: rows[0][2].copy_(rows[0][ACTIVE[1]]),
    "before the memory": lambda r, rows: _flip(r.memory._whole[r.memory._guard - 1 :][:1]),
    "behind the memory": lambda r, rows: _flip(r.memory._whole[-r.memory._guard :][:1]),
    "a draft's byte": lambda r, rows: _flip(
        r.memory.rows(r.memory.placement.drafts[0].components[0])[0, :1]
    ),
}


def broadcast(rank: Rank, policy: BroadcastPolicy, wrong: str | None) -> Seen:
    """One step; layer 0 is rank 0's."""
    r = make_rig(rank, "cpu", model=uneven_model(5), policy=policy)
    if wrong is not None and rank.rank == 1:
        transfer = r.pipeline._transfer
        start: Callable[..., None] = transfer.start

        def go_wrong() -> None:
            components = r.memory.placement.bundles[0].components
            BROADCASTS[wrong](r, [r.memory.rows(component) for component in components])

        def faulty(ordinal: int, *rest: Any) -> None:
            start(ordinal, *rest)
            if ordinal == 0:
                r.device.transfer.run(go_wrong, wrong)

        mock.patch.object(transfer, "start", faulty).start()
    seen = Seen([], [])
    check_step(r, "step", ACTIVE, 2, seen)
    rank.barrier()
    r.close()
    return seen
