"""Each safety property, a change that breaks it, and the test that must then fail.

`python -m tests.safety` makes the changes one by one in a copy of the project and runs their tests.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTATIONS", "PROPERTIES", "Mutation"]

PROPERTIES = {
    "S1": "no block is handed out while a read or a write on it is under way",
    "S2": "every abort gets exactly one answer, after the drain",
    "S3": "a lost peer: bounded wait, blocks reclaimed, late completions ignored",
    "S4": "a layer is broadcast only after its owner's load; a failed load reaches every rank",
    "S5": "no component is read before it is ready",
    "S6": "a hit needs every shard, stage and component",
    "S7": "earlier writes and a broadcast are ordered both ways",
    "S8": "what decides a collective or a shape comes from facts that the group agreed on",
    "S9": "preemption and eviction wait for saves that read the block, or cancel them",
    "S10": "a source is not overwritten before receivers are done; a slot not before its reader",
    "S11": "unlike namespaces never share an object",
    "S12": "transfers are checked byte for byte, with sentinels around the payload",
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """``old`` occurs once in ``file``; with ``new`` in its place ``test`` must fail."""

    breaks: str  # the property
    what: str  # what goes wrong
    file: str
    old: str
    new: str
    test: str  # pytest's arguments


MACHINES = "tests/safety/test_machines.py::test_every_interleaving_ends_well"
ORDERING = "tests/core/test_pipeline_ordering.py::"
WAIT_FOR_COMPUTE = (
    "        transfer.wait(self._device.compute.record(), "
    'f"computation before layer {bundle.layer}")\n'
)
FAILURES = "tests/core/test_pipeline_failures.py::"

MUTATIONS = [
    Mutation(
        "S1", "a request's blocks are free while its saves wait",
        "kvpp_connectors/pool/scheduler.py",
        "        return tracked.holds\n", "        return False\n",
        f"{MACHINES}[pool]",
    ),
    Mutation(
        "S1", "a failed batch returns while its other reads still write",
        "kvpp_connectors/p2p/reads.py",
        "    while running or (waiting and problem is None):",
        "    while problem is None and (running or waiting):",
        "tests/p2p/test_reads.py",
    ),
    Mutation(
        "S1", "blocks on offer are not held",
        "kvpp_connectors/p2p/connector.py",
        "        return params is not None, params", "        return False, params",
        f"{MACHINES}[prefill]",
    ),
    Mutation(
        "S2", "an aborted pull has no result",
        "kvpp_connectors/p2p/puller.py",
        "                self._results.append(result)\n",
        "                if result.reason != 'cancelled':\n"
        "                    self._results.append(result)\n",
        "tests/p2p/test_puller.py",
    ),
    Mutation(
        "S3", "leases do not expire",
        "kvpp_connectors/p2p/lease.py",
        "        if lease is not None and lease.expires <= now:", "        if False:",
        "tests/p2p/test_lease.py",
    ),
    Mutation(
        "S3", "a released lease can still be confirmed",
        "kvpp_connectors/p2p/lease.py",
        "and reader in over.confirmed", "and reader >= 0",
        "tests/p2p/test_lease.py",
    ),
    Mutation(
        "S4", "the owner's broadcast does not wait for its load",
        "kvpp_core/pipeline.py",
        "            self._device.transfer.wait_fence(fence, self._settings.load_timeout, what)\n",
        "",
        f"{ORDERING}test_a_layer_is_broadcast_after_its_late_load",
    ),
    Mutation(
        "S4", "the engine does not tell its pipeline of the loads in a step",
        "kvpp_connectors/engine/worker.py",
        "loads.take_fences() if loads is not None else None", "None",
        "tests/pool/test_layer_order.py"
        "::test_a_layer_is_broadcast_after_its_load_and_attention_waits",
    ),
    Mutation(
        "S4", "a failed load is not told to the other ranks",
        "kvpp_core/pipeline.py",
        "        status.fill_(self._decided())",
        "        status.fill_(_LoadStatus.OK)",
        f"{FAILURES}test_a_failed_load_raises_on_every_rank_and_the_next_step_is_right",
    ),
    Mutation(
        "S4", "what a failed load left in a block is taken for computed",
        "kvpp_connectors/pool/spoilt.py",
        "        return sorted(self._reported)\n", "        return []\n",
        "tests/safety/test_s04_failed_loads.py",
    ),
    Mutation(
        "S5", "a layer is read before its broadcast has ended",
        "kvpp_core/pipeline.py",
        "        self._device.compute.wait(in_flight.done, "
        'f"the broadcast of layer {self._layer(ordinal)}")\n',
        "",
        f"{ORDERING}test_a_layer_is_not_read_before_its_late_broadcast_has_ended",
    ),
    Mutation(
        "S6", "one shard of a block is enough for a hit",
        "kvpp_connectors/pool/keys.py",
        "for shard in self.topology.shards)\n", "for shard in self.topology.shards[:1])\n",
        "tests/pool/test_keys.py::test_a_hit_needs_every_rank_that_keeps_something",
    ),
    Mutation(
        "S7", "a broadcast does not wait for the owner's earlier writes",
        "kvpp_core/pipeline.py",
        WAIT_FOR_COMPUTE, "",
        f"{ORDERING}test_a_broadcast_covers_the_owners_earlier_late_write",
    ),
    Mutation(
        "S8", "ranks do not compare their manifests' owners",
        "kvpp_core/manifest.py",
        '                    "owner": owner,\n', "",
        "tests/core/test_manifest.py",
    ),
    Mutation(
        "S9", "workers do not hear of preempted requests",
        "kvpp_connectors/pool/scheduler.py",
        "                    step.preempted.append(name)\n", "",
        f"{MACHINES}[pool]",
    ),
    Mutation(
        "S9", "a preempted request is saved from blocks that were its own",
        "kvpp_connectors/pool/tracking.py",
        "        self._filled.clear()\n        self.blocks, self.done, self.holds = [], 0, False\n",
        "        self.holds = False\n",
        "tests/pool/test_tracking.py",
    ),
    Mutation(
        "S10", "a slot is refilled while its last reader still reads",
        "kvpp_core/pipeline.py",
        WAIT_FOR_COMPUTE, "",
        f"{ORDERING}test_a_slot_is_not_refilled_before_its_late_reader_is_done",
    ),
    Mutation(
        "S11", "the split over ranks is not part of an object's name",
        "kvpp_connectors/pool/keys.py",
        '@{self.topology.name}"', '@one"',
        "tests/pool/test_keys.py",
    ),
    Mutation(
        "S11", "an object of another key is taken for one's own",
        "kvpp_connectors/pool/objects.py",
        "        return outcome if wrong is None else Outcome(Result.FOREIGN, words=wrong)",
        "        return outcome",
        "tests/pool/test_objects.py",
    ),
    Mutation(
        "S12", "a pull's reads are one block off",
        "kvpp_connectors/p2p/plan.py",
        "                    theirs.base + remote_blocks[start] * theirs.stride,",
        "                    theirs.base + max(remote_blocks[start] - 1, 0) * theirs.stride,",
        "tests/p2p/test_byte_grid.py",
    ),
]  # fmt: skip
