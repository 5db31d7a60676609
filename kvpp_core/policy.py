"""The modes of a broadcast (none, full, runs of active blocks, packed) and their choice.

Section 2.3 of the specification broadcasts the complete bundle, so that traffic grows with the
pool. Only blocks that hold history of the step's requests are ever read, so ``auto`` chooses per
bundle and step, by a cost model and from numbers that all ranks share, whether to send

- ``full``: the whole bundle in one message, nothing to copy;
- ``runs``: a message for each run of adjacent active blocks, nothing to copy either;
- ``packed``: the active blocks gathered into staging memory, one message, scattered back to the
  same block ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvpp_core.bundles import LayerBundle
from kvpp_core.history import History

__all__ = [
    "BroadcastPolicy",
    "CostModel",
    "DecodePolicy",
    "Mode",
    "blocks_per_message",
    "choose_mode",
    "mode_bytes",
]


class Mode(StrEnum):
    """What a broadcast sends."""

    NONE = "none"
    FULL = "full"
    RUNS = "runs"
    PACKED = "packed"


class BroadcastPolicy(StrEnum):
    """How the mode of a broadcast is chosen."""

    AUTO = "auto"  # the cheapest by the cost model
    FULL = "full"  # the specification
    ACTIVE = "active"  # the cheaper of runs and packed
    RUNS = "runs"
    PACKED = "packed"


class DecodePolicy(StrEnum):
    """Where a decode token attends to the history that another rank owns."""

    BROADCAST = "broadcast"  # on its own rank: the history moves
    OWNER = "owner"  # at the owner: its query moves
    AUTO = "auto"  # at the owner where supported


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of a broadcast in one group, from calibration.py: seconds, and bytes per second."""

    latency: float  # of one message
    per_range: float  # of each further message of the same bundle
    bandwidth: float  # of the broadcast
    pack_bandwidth: float  # of gathering on the owner and scattering on the others

    def seconds(self, mode: Mode, nbytes: int, messages: int) -> float:
        """Time of a broadcast of ``nbytes`` in ``messages`` messages."""
        seconds = self.latency + (messages - 1) * self.per_range + nbytes / self.bandwidth
        return seconds + nbytes / self.pack_bandwidth if mode is Mode.PACKED else seconds

    def __str__(self) -> str:
        return (
            f"{self.latency * 1e3:.3g} ms a message, {self.per_range * 1e3:.3g} ms each further "
            f"one, {self.bandwidth / 1e9:.3g} GB/s, packing {self.pack_bandwidth / 1e9:.3g} GB/s"
        )


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
    """The mode for one bundle in one step, from facts that are the same on every rank.

    ``auto`` sends a full bundle only if more than half of the pool is active, even where the cost
    model prefers it: the links carry other traffic, too.
    """
    if not history.blocks:
        return Mode.NONE
    if policy in (BroadcastPolicy.FULL, BroadcastPolicy.RUNS):
        return Mode(policy.value)
    can_pack = staging_bytes >= bundle.bytes_per_block
    if policy is BroadcastPolicy.PACKED:
        return Mode.PACKED if can_pack else Mode.RUNS
    messages = {}  # of equal costs the first wins
    if policy is BroadcastPolicy.AUTO and 2 * len(history.blocks) > history.num_blocks:
        messages[Mode.FULL] = 1
    messages[Mode.RUNS] = len(history.runs) * len(bundle.components)
    if can_pack:
        messages[Mode.PACKED] = -(-len(history.blocks) // blocks_per_message(bundle, staging_bytes))
    return min(
        messages,
        key=lambda mode: cost.seconds(mode, mode_bytes(mode, bundle, history), messages[mode]),
    )


def blocks_per_message(bundle: LayerBundle, staging_bytes: int) -> int:
    """How many blocks of a bundle one packed message holds, 0 when staging is too small."""
    return staging_bytes // bundle.bytes_per_block
