"""One bundle's broadcast: none, full, runs of active blocks, or packed.

Section 2.3 of the specification broadcasts the complete bundle, so that traffic grows with the
pool. Only blocks that hold history of the step's requests are ever read, so ``auto`` chooses per
bundle and step, by a cost model and from numbers that all ranks share, whether to send

- ``full``: the whole bundle in one message, nothing to copy;
- ``runs``: a message for each run of adjacent active blocks, nothing to copy either;
- ``packed``: the active blocks gathered into staging memory, one message, scattered back to the
  same block ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from kvpp_core.bundles import LayerBundle
from kvpp_core.device.base import Stream
from kvpp_core.errors import PlanError
from kvpp_core.group import KvppGroup
from kvpp_core.layout import RankLayout

__all__ = [
    "BroadcastPolicy",
    "BundleTransfer",
    "CostModel",
    "History",
    "Mode",
    "choose_mode",
    "cost_model",
    "find_runs",
    "mode_bytes",
]


class Mode(StrEnum):
    """What a broadcast sends."""

    NONE = "none"
    FULL = "full"
    RUNS = "runs"
    PACKED = "packed"


class BroadcastPolicy(StrEnum):
    """How the mode of a broadcast is found."""

    AUTO = "auto"  # the cheapest by the cost model
    FULL = "full"  # the specification
    ACTIVE = "active"  # the cheaper of runs and packed
    RUNS = "runs"
    PACKED = "packed"


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a broadcast costs on one backend: seconds, and bytes per second."""

    latency: float  # of one message
    per_range: float  # of each further message of the same bundle
    bandwidth: float  # of the broadcast
    pack_bandwidth: float  # of gathering on the owner and scattering on the others

    def seconds(self, mode: Mode, nbytes: int, messages: int) -> float:
        """Time of a broadcast of ``nbytes`` in ``messages`` messages."""
        seconds = self.latency + (messages - 1) * self.per_range + nbytes / self.bandwidth
        return seconds + nbytes / self.pack_bandwidth if mode is Mode.PACKED else seconds


# The constants of the cost model, all in one place. gloo: fitted on two cores over loopback
# (docs/design.md); the two accelerator rows are estimates from published figures, not measured.
_COSTS: dict[tuple[str, int], CostModel] = {
    ("gloo", 2): CostModel(0.44e-3, 0.18e-3, 2.8e9, 4.4e9),
    ("gloo", 4): CostModel(1.0e-3, 0.77e-3, 1.0e9, 2.1e9),
    ("nccl", 2): CostModel(30e-6, 15e-6, 150e9, 600e9),
    ("hccl", 2): CostModel(50e-6, 25e-6, 78e9, 400e9),
}


def cost_model(backend: str, ranks: int) -> CostModel:
    """The constants for a backend; an unknown one counts as gloo, larger groups as the largest."""
    name = backend if any(known == backend for known, _ in _COSTS) else "gloo"
    sizes = sorted(size for known, size in _COSTS if known == name)
    size = next((size for size in sizes if size >= ranks), sizes[-1])
    return _COSTS[name, size]


@dataclass(frozen=True, slots=True)
class History:
    """The active blocks of a step: sorted ids, their runs [first, first + length), the pool."""

    blocks: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    num_blocks: int

    @classmethod
    def of(cls, blocks: Sequence[int], num_blocks: int) -> History:
        """From block ids, sorted and unique.

        Raises:
            PlanError: an id is outside the pool.
        """
        if blocks and not (blocks[0] >= 0 and blocks[-1] < num_blocks):
            raise PlanError(
                f"active blocks {blocks[0]}..{blocks[-1]} are outside a pool of {num_blocks}"
            )
        return cls(tuple(blocks), find_runs(blocks), num_blocks)


def find_runs(blocks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Runs of adjacent ids in a sorted sequence, as (first id, length)."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)


def mode_bytes(mode: Mode, bundle: LayerBundle, history: History) -> int:
    """Payload bytes that a broadcast of ``bundle`` in ``mode`` moves."""
    if mode is Mode.NONE:
        return 0
    blocks = history.num_blocks if mode is Mode.FULL else len(history.blocks)
    return blocks * bundle.bytes_per_block


def choose_mode(
    bundle: LayerBundle,
    history: History,
    policy: BroadcastPolicy,
    cost: CostModel,
    staging_bytes: int,
) -> Mode:
    """The mode for one bundle in one step. The same on every rank: it looks at shared facts only.

    ``auto`` sends a full bundle only when more than half of the pool is active, however cheap the
    model thinks it: the links carry other traffic too.
    """
    if not history.blocks:
        return Mode.NONE
    if policy in (BroadcastPolicy.FULL, BroadcastPolicy.RUNS):
        return Mode(policy.value)
    can_pack = staging_bytes >= bundle.bytes_per_block
    if policy is BroadcastPolicy.PACKED:
        return Mode.PACKED if can_pack else Mode.RUNS
    messages = {Mode.RUNS: len(history.runs) * len(bundle.components)}
    if can_pack:
        messages[Mode.PACKED] = -(
            -len(history.blocks) // _blocks_per_message(bundle, staging_bytes)
        )
    if policy is BroadcastPolicy.AUTO and 2 * len(history.blocks) > history.num_blocks:
        messages[Mode.FULL] = 1
    return min(
        messages,
        key=lambda mode: cost.seconds(mode, mode_bytes(mode, bundle, history), messages[mode]),
    )


def _blocks_per_message(bundle: LayerBundle, staging_bytes: int) -> int:
    return staging_bytes // bundle.bytes_per_block


class BundleTransfer:
    """Broadcasts bundles of one rank's buffer over its group, on one stream.

    ``buffer`` is the rank's whole KV memory, one-dimensional bytes; ``staging`` is memory of the
    same device for packed messages and may be empty.
    """

    def __init__(
        self,
        layout: RankLayout,
        buffer: torch.Tensor,
        staging: torch.Tensor,
        group: KvppGroup,
        stream: Stream,
    ) -> None:
        if buffer.dim() != 1 or buffer.element_size() != 1 or buffer.numel() < layout.size:
            raise PlanError(
                f"the KV memory must be {layout.size:,} bytes in one dimension, not "
                f"{tuple(buffer.shape)} of {buffer.dtype}"
            )
        self._layout = layout
        self._buffer = buffer
        self._staging = staging
        self._group = group
        self._stream = stream

    def start(self, ordinal: int, mode: Mode, history: History, index: torch.Tensor) -> None:
        """Submit the broadcast of target bundle ``ordinal`` to the stream.

        ``index`` holds the active block ids (int64, on the buffer's device).
        """
        if mode is Mode.FULL:
            self._send(self._bytes(*self._layout.targets[ordinal]), ordinal, "all blocks")
        elif mode is Mode.RUNS:
            self._start_runs(ordinal, history)
        elif mode is Mode.PACKED:
            self._start_packed(ordinal, index)

    def _start_runs(self, ordinal: int, history: History) -> None:
        for rows in self._components(ordinal):
            for first, length in history.runs:
                message = rows[first : first + length].view(-1)
                self._send(message, ordinal, f"blocks {first}..{first + length - 1}")

    def _start_packed(self, ordinal: int, index: torch.Tensor) -> None:
        bundle = self._layout.placement.bundles[ordinal]
        per_message = _blocks_per_message(bundle, self._staging.numel())
        for ids in index.split(per_message):
            message = self._staging[: len(ids) * bundle.bytes_per_block]
            views = self._staged(ordinal, message, len(ids))
            what = self._what(ordinal, f"{len(ids)} packed blocks")
            if self._layout.placement.owners[ordinal] == self._group.rank:
                self._stream.run(_gather(views, ids), f"gathering for {what}")
                self._send(message, ordinal, f"{len(ids)} packed blocks")
            else:
                self._send(message, ordinal, f"{len(ids)} packed blocks")
                self._stream.run(_scatter(views, ids), f"scattering {what}")

    def _staged(
        self, ordinal: int, message: torch.Tensor, blocks: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(cache rows, their place in the message) of every component."""
        places, offset = [], 0
        for rows in self._components(ordinal):
            size = blocks * rows.shape[1]
            places.append((rows, message[offset : offset + size].view(blocks, rows.shape[1])))
            offset += size
        return places

    def _components(self, ordinal: int) -> list[torch.Tensor]:
        """Every component of a bundle as (blocks, bytes per block)."""
        components = self._layout.placement.bundles[ordinal].components
        return [
            self._bytes(*self._layout.components[c.name]).view(-1, c.bytes_per_block)
            for c in components
        ]

    def _bytes(self, offset: int, size: int) -> torch.Tensor:
        return self._buffer[offset : offset + size]

    def _send(self, message: torch.Tensor, ordinal: int, part: str) -> None:
        owner = self._layout.placement.owners[ordinal]
        self._stream.collective(
            lambda: self._group.broadcast(message, owner), self._what(ordinal, part)
        )

    def _what(self, ordinal: int, part: str) -> str:
        bundle = self._layout.placement.bundles[ordinal]
        owner = self._group.ranks[self._layout.placement.owners[ordinal]]
        return f"the broadcast of layer {bundle.layer} ({part}) from rank {owner}"


def _gather(
    views: Sequence[tuple[torch.Tensor, torch.Tensor]], ids: torch.Tensor
) -> Callable[[], None]:
    def gather() -> None:
        for rows, place in views:
            torch.index_select(rows, 0, ids, out=place)

    return gather


def _scatter(
    views: Sequence[tuple[torch.Tensor, torch.Tensor]], ids: torch.Tensor
) -> Callable[[], None]:
    def scatter() -> None:
        for rows, place in views:
            rows.index_copy_(0, ids, place)

    return scatter
