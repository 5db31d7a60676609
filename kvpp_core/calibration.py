"""The constants of the cost model, measured once at start-up.

Every rank times the same broadcasts of a small trial layer, made as the pipeline makes them; the
slowest rank's times count, so that all ranks compute the same constants and choose the same modes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

import torch

from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.device import Device, Stream
from kvpp_core.group import KvppGroup
from kvpp_core.history import History
from kvpp_core.layout import Placement, build_layout
from kvpp_core.policy import CostModel, Mode
from kvpp_core.transfer import BundleTransfer

__all__ = ["measure_costs"]

_BLOCKS, _BLOCK_BYTES = 256, 64 << 10
_RUNS = 16
_ONE = range(1)
_MANY = range(0, 2 * _RUNS, 2)  # each a run of its own
_SCATTERED = range(0, _BLOCKS, 2)
_REPEATS = 4  # after a warm-up
_LEAST_S = 1e-7  # the difference of two times may be 0 or less


def measure_costs(
    group: KvppGroup, device: Device, place: torch.device | str, timeout: float
) -> CostModel:
    """Measure the constants of this group, the same on every rank. Collective.

    Uses 24 MiB on ``place`` meanwhile. ``timeout`` (seconds) bounds each wait.

    Raises:
        KvppError: a broadcast failed or did not end in time.
    """
    bundle = LayerBundle(0, (Component("trial", _BLOCK_BYTES),))
    layout = build_layout(Placement((bundle,), (0,), group.size, group.rank), _BLOCKS)
    stream = device.transfer
    buffer = torch.zeros(layout.size, dtype=torch.int8, device=place)
    staging = torch.zeros(len(_SCATTERED) * _BLOCK_BYTES, dtype=torch.int8, device=place)
    transfer = BundleTransfer(layout, buffer, staging, group, stream)

    def trial(mode: Mode, blocks: range) -> float:
        history, index = History.of(blocks, _BLOCKS), torch.tensor(blocks, device=place)
        return _quickest(partial(transfer.start, 0, mode, history, index), stream, group, timeout)

    mine = {
        "one": trial(Mode.RUNS, _ONE),
        "many": trial(Mode.RUNS, _MANY),
        "full": trial(Mode.FULL, range(_BLOCKS)),
        "packed": trial(Mode.PACKED, _SCATTERED),
    }
    by_rank = [json.loads(times) for times in group.all_gather_bytes(json.dumps(mine).encode())]
    return _fit({name: max(float(times[name]) for times in by_rank) for name in mine})


def _fit(seconds: dict[str, float]) -> CostModel:
    """The constants for which `CostModel.seconds` gives these times."""
    block = max((seconds["full"] - seconds["one"]) / (_BLOCKS - 1), _LEAST_S / _BLOCKS)
    latency = max(seconds["one"] - block, _LEAST_S)
    per_range = max((seconds["many"] - seconds["one"]) / (_RUNS - 1) - block, _LEAST_S)
    packing = max(seconds["packed"] - latency - len(_SCATTERED) * block, _LEAST_S)
    return CostModel(
        latency=latency,
        per_range=per_range,
        bandwidth=_BLOCK_BYTES / block,
        pack_bandwidth=len(_SCATTERED) * _BLOCK_BYTES / packing,
    )


def _quickest(start: Callable[[], None], stream: Stream, group: KvppGroup, timeout: float) -> float:
    """Least seconds until the work of ``start`` has ended on this rank; all ranks begin at once."""
    seconds = []
    for _ in range(_REPEATS + 1):
        group.all_gather_bytes(b"")
        started = time.perf_counter()
        start()
        stream.record().wait(timeout)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
