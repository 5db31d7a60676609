"""A gloo group of processes on this machine, for commands that measure it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpp_core.group import KvppGroup

__all__ = ["TIMEOUT_S", "RanksFailed", "broadcast_costs", "run_ranks"]

TIMEOUT_S = 60.0  # of each collective


class RanksFailed(Exception):
    """A rank ended with an error. The message is the error's last line."""


def run_ranks(ranks: int, function: Callable[..., object], *arguments: object) -> Any:
    """Call ``function(group, *arguments)`` on every rank; rank 0's result, through JSON.

    Raises:
        RanksFailed: a rank failed.
    """
    from torch.multiprocessing.spawn import ProcessException, spawn

    with tempfile.TemporaryDirectory(prefix="kvpp-ranks-") as folder:
        try:
            spawn(_rank_main, (ranks, folder, function, arguments), nprocs=ranks)
        except ProcessException as error:
            last = str(error).strip().splitlines()[-1]
            raise RanksFailed(f"rank {error.error_index} of {ranks}: {last}") from error
        return json.loads((Path(folder) / "result").read_text())


def broadcast_costs(group: KvppGroup) -> str:
    """Costs of a broadcast in the group, as text."""
    from kvpp_core.calibration import measure_costs
    from kvpp_core.device import CpuDevice

    return str(measure_costs(group, CpuDevice(TIMEOUT_S), "cpu", TIMEOUT_S))


def _rank_main(
    rank: int, ranks: int, folder: str, function: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    from kvpp_core.group import make_group

    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    group = make_group([range(ranks)], rank, "gloo", TIMEOUT_S)
    result = function(group, *arguments)
    if rank == 0:
        (Path(folder) / "result").write_text(json.dumps(result))
    group.close()
    dist.destroy_process_group()
