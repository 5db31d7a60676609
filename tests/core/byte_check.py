"""A step of a rig in which every byte of memory and every byte sent is checked.

At each acquire the rank's whole allocation is compared with a model of it: own bundles, drafts,
both scratch slots and the sentinels around the buffer. Only the slot that is being filled for the
next layer is left out, and it was poisoned just before its transfer was started, so that a byte
too many is seen as well as a byte too few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvpp_core.history import History
from kvpp_core.layout import SCRATCH_SLOTS
from kvpp_core.policy import BroadcastPolicy, Mode, choose_mode, mode_bytes
from tests.core.rig import Rig

__all__ = ["Seen", "check_step", "check_step_without_history"]


class Seen(NamedTuple):
    """What a rank found wrong."""

    bytes: list[str]
    traffic: list[str]


def check_step(
    r: Rig,
    name: str,
    active: Sequence[int],
    generation: int,
    seen: Seen,
    acquire: Callable[[Rig, int], None] = Rig.acquire,
) -> None:
    """Run one step; compare the whole memory at each acquire, and the traffic at the end.

    ``acquire`` touches the components of a target layer.
    """
    memory, sent_before = r.memory, r.group.sent_bytes
    stats_before = r.pipeline.stats.bytes.total()
    modes = [
        choose_mode(
            bundle,
            History.of(active, memory.num_blocks),
            r.settings.policy,
            r.settings.cost,
            r.staging_bytes,
        )
        for bundle in memory.placement.bundles
    ]
    memory.store_owned(generation)
    memory.store_drafts(generation)
    for slot in range(SCRATCH_SLOTS):
        if r.settings.poison_scratch:
            memory.expect_poison(slot)
        else:
            memory.poison_slot(slot)
    r.pipeline.begin(active)
    for ordinal, mode in enumerate(modes):
        filling = memory.layout.slot_of(ordinal + 1) if ordinal + 1 < r.layers else None
        if filling is not None and not r.settings.poison_scratch:
            memory.poison_slot(filling)  # free: the layer before this one has been computed
        acquire(r, ordinal)
        if not r.owns(ordinal):
            full = mode is Mode.FULL
            memory.expect(ordinal, range(memory.num_blocks) if full else active, generation)
        seen.bytes.extend(
            f"{name}, layer {ordinal}: {found}" for found in memory.difference(filling)
        )
    r.pipeline.end()
    seen.bytes.extend(f"{name}, at the end: {found}" for found in memory.difference())
    sent = r.group.sent_bytes - sent_before
    counted = r.pipeline.stats.bytes.total() - stats_before
    seen.traffic.extend(_traffic(r, name, active, modes, sent, counted))


def _traffic(
    r: Rig, name: str, active: Sequence[int], modes: Sequence[Mode], sent: int, counted: int
) -> list[str]:
    """What is wrong with the bytes that were handed to the group in one step."""
    bundles, blocks = r.memory.placement.bundles, r.memory.num_blocks
    history = History.of(active, blocks)
    modelled = sum(mode_bytes(m, b, history) for m, b in zip(modes, bundles, strict=True))
    per_block = sum(bundle.bytes_per_block for bundle in bundles)
    policy = r.settings.policy
    rules = {
        "not what the statistics count": sent == counted,
        "not what the modes say": sent == modelled,
        "more than the full bundles": sent <= blocks * per_block,
        "not the full bundles": policy is not BroadcastPolicy.FULL or sent == blocks * per_block,
        "not just the active blocks": policy in (BroadcastPolicy.FULL, BroadcastPolicy.AUTO)
        or sent == len(active) * per_block,
        "over 1.05 x the active blocks": policy is not BroadcastPolicy.AUTO
        or 2 * len(active) > blocks
        or sent <= 1.05 * len(active) * per_block,
    }
    return [f"{name}: {sent} bytes sent, {rule}" for rule, holds in rules.items() if not holds]


def check_step_without_history(r: Rig, name: str, seen: Seen) -> None:
    """Nothing moves, nothing is counted, no byte of memory changes but by poison."""
    if r.settings.poison_scratch:
        for slot in range(SCRATCH_SLOTS):
            r.memory.expect_poison(slot)
    sent, counted = len(r.group.sent), r.pipeline.stats.snapshot()
    r.pipeline.begin(())
    for ordinal in range(r.layers):
        r.acquire(ordinal)
    r.pipeline.end()
    seen.bytes.extend(f"after {name}, no history: {found}" for found in r.memory.difference())
    if len(r.group.sent) != sent:
        seen.traffic.append(f"after {name}: a step without history sent something")
    counted["steps"] = r.pipeline.stats.steps
    if r.pipeline.stats.snapshot() != counted:
        seen.traffic.append(f"after {name}: a step without history was counted")
