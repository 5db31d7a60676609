"""Each safety property, a change that breaks it, and the test that must then fail.

`python -m tests.safety` makes the changes one by one in a copy of the project and runs their tests.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTATIONS", "PROPERTIES", "S04", "S05", "S07", "S10", "Mutation"]

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
S01 = "tests/safety/test_s01_blocks_in_use.py"
S02 = "tests/safety/test_s02_aborts.py"
S03 = "tests/safety/test_s03_lost_peers.py"
S04 = "tests/safety/test_s04_loads_and_broadcasts.py"
S05 = "tests/safety/test_s05_nothing_read_early.py"
S06 = "tests/safety/test_s06_whole_hits.py"
S07 = "tests/safety/test_s07_earlier_writes.py"
S08 = "tests/safety/test_s08_agreed_facts.py"
S09 = "tests/safety/test_s09_saves_and_preemption.py"
S10 = "tests/safety/test_s10_sources_and_slots.py"
S11 = "tests/safety/test_s11_namespaces.py"
S12 = "tests/safety/test_s12_bytes.py"

WAIT_FOR_COMPUTE = (
    "        transfer.wait(self._device.compute.record(), "
    'f"computation before layer {bundle.layer}")\n'
)
WAIT_FOR_TRANSFER = (
    "        self._device.compute.wait(in_flight.done, "
    'f"the broadcast of layer {self._layer(ordinal)}")\n'
)

MUTATIONS = [
    Mutation(
        "S1", "a request's blocks are free while its saves wait",
        "kvpp_connectors/pool/scheduler.py",
        "        return state.holds\n", "        return False\n",
        f"{S01}::test_blocks_in_use_are_nobody_elses_until_their_last_user_ends",
    ),
    Mutation(
        "S1", "blocks on offer are not held",
        "kvpp_connectors/p2p/connector.py",
        "        return params is not None, params", "        return False, params",
        f"{S01}::test_blocks_in_use_are_nobody_elses_until_their_last_user_ends",
    ),
    Mutation(
        "S1", "a failed batch returns while its other reads still write",
        "kvpp_connectors/p2p/read_window.py",
        "    while running or (waiting and problem is None):",
        "    while problem is None and (running or waiting):",
        f"{S01}::test_a_failed_pull_ends_after_the_last_read_that_can_still_write",
    ),
    Mutation(
        "S2", "an aborted pull has no result",
        "kvpp_connectors/p2p/pull_worker.py",
        "                self._results.append(result)\n",
        "                if result.reason != 'cancelled':\n"
        "                    self._results.append(result)\n",
        f"{S02}::test_a_cancelled_pull_ends_early_and_releases_the_lease",
    ),
    Mutation(
        "S2", "an aborted pull is answered before its reads have ended",
        "kvpp_connectors/p2p/read_window.py",
        "        problem = problem or stop()\n",
        "        if (problem := problem or stop()) is not None:\n"
        "            return Outcome(done, problem)\n",
        f"{S02}::test_an_abort_is_answered_after_the_last_read_that_can_still_write",
    ),
    Mutation(
        "S2", "an aborted request that holds nothing is answered for",
        "kvpp_connectors/pool/scheduler.py",
        "        if state.holds:\n            self._ended.append(state.life)\n",
        "        self._ended.append(state.life)\n",
        f"{S02}::test_an_aborted_request_is_freed_once_whenever_its_client_leaves",
    ),
    Mutation(
        "S3", "leases do not expire",
        "kvpp_connectors/p2p/lease.py",
        "        for transfer_id in [t for t, lease in self._held.items() "
        "if lease.expires <= now]:",
        "        for transfer_id in []:",
        f"{S03}::test_bytes_that_were_read_after_the_lease_had_expired_do_not_count",
    ),
    Mutation(
        "S3", "a lease that is over can still be confirmed",
        "kvpp_connectors/p2p/lease.py",
        "and reader in over.confirmed", "and reader >= 0",
        f"{S03}::test_what_a_lost_peer_says_after_its_lease_changes_nothing",
    ),
    Mutation(
        "S3", "bytes count that were read after the lease",
        "kvpp_connectors/p2p/pull_worker.py",
        "        lease.confirm()\n", "",
        f"{S03}::test_bytes_that_were_read_after_the_lease_had_expired_do_not_count",
    ),
    Mutation(
        "S3", "a late message of an older offer ends a newer one",
        "kvpp_connectors/p2p/lease.py",
        "        if lease.generation != generation:", "        if False:",
        f"{S03}::test_what_a_lost_peer_says_after_its_lease_changes_nothing",
    ),
    Mutation(
        "S3", "reads have no bound",
        "kvpp_connectors/p2p/pull_worker.py",
        "            if time.monotonic() > deadline:", "            if False:",
        f"{S03}::test_reads_that_take_too_long_are_given_up",
    ),
    Mutation(
        "S3", "a pipeline goes on while a lost peer's bytes may still come",
        "kvpp_core/pipeline.py",
        "            self._state = _State.BROKEN\n", "            self._state = _State.IDLE\n",
        f"{S03}::test_a_peer_that_never_joins_is_a_timeout_that_names_layer_and_owner",
    ),
    Mutation(
        "S4", "the owner's broadcast does not wait for its load",
        "kvpp_core/pipeline.py",
        "            self._device.transfer.wait_fence(fence, self._settings.load_timeout, what)\n",
        "",
        f"{S04}::test_a_layer_is_broadcast_after_its_late_load",
    ),
    Mutation(
        "S4", "the engine does not tell its pipeline of the loads in a step",
        "kvpp_connectors/engine/step_driver.py",
        "loads.take_fences() if loads is not None else None", "None",
        "tests/pool/test_layer_order.py"
        "::test_a_layer_is_broadcast_after_its_load_and_attention_waits",
    ),
    Mutation(
        "S4", "a failed load is not told to the other ranks",
        "kvpp_core/pipeline.py",
        "        status.fill_(self._decided())",
        "        status.fill_(_LoadStatus.OK)",
        f"{S04}::test_a_failed_load_raises_on_every_rank_and_the_next_step_is_right",
    ),
    Mutation(
        "S4", "a pool's load that brought not every block ends well",
        "kvpp_connectors/pool/modes/layerwise.py",
        "            if bad:\n", "            if False:\n",
        f"{S04}::test_a_step_from_a_pool_has_the_pools_bytes_or_says_which_it_has_not",
    ),
    Mutation(
        "S4", "what a failed load left in a block is taken for computed",
        "kvpp_connectors/pool/invalid_blocks.py",
        "        return sorted(self._reported)\n", "        return []\n",
        S04 + "::test_blocks_of_a_request_that_is_aborted_before_it_computes_them",
    ),
    Mutation(
        "S5", "a layer is read before its broadcast has ended",
        "kvpp_core/pipeline.py",
        WAIT_FOR_TRANSFER, "",
        f"{S05}::test_a_layer_is_not_read_before_its_late_broadcast_has_ended",
    ),
    Mutation(
        "S5", "a step starts before its draft layers are loaded",
        "kvpp_connectors/pool/modes/layerwise.py",
        "wait([self._begin(layer, Future())])", "self._begin(layer, Future())",
        f"{S05}::test_a_step_starts_when_its_draft_layers_are_loaded",
    ),
    Mutation(
        "S5", "without KVPP a step starts before its layers are loaded",
        "kvpp_connectors/pool/modes/layerwise.py",
        "            self.drain()  # no broadcast waits for them\n",
        "            pass\n",
        f"{S05}::test_without_kvpp_a_step_starts_when_every_layer_is_loaded",
    ),
    Mutation(
        "S6", "one shard of a block is enough for a hit",
        "kvpp_connectors/pool/keys.py",
        "for shard in self.topology.shards)\n", "for shard in self.topology.shards[:1])\n",
        f"{S06}::test_a_block_of_which_any_shard_is_gone_ends_the_hit",
    ),
    Mutation(
        "S6", "a block is marked as whole although a layer was not saved",
        "kvpp_connectors/pool/modes/layerwise.py",
        "                if is_whole  # all its layers are in the store\n", "",
        f"{S06}::test_a_block_of_which_any_layer_was_not_saved_ends_the_hit",
    ),
    Mutation(
        "S6", "the shards of draft layers alone are not asked for",
        "kvpp_connectors/pool/keys.py",
        "            if rank in manifest.owners or stage in stages_with_drafts\n",
        "            if rank in manifest.owners[:1]\n",
        f"{S06}::test_what_every_rank_has_saved_is_hit_and_comes_back",
    ),
    Mutation(
        "S7", "a broadcast does not wait for the owner's earlier writes",
        "kvpp_core/pipeline.py",
        WAIT_FOR_COMPUTE, "",
        f"{S07}::test_a_broadcast_covers_the_owners_earlier_late_write",
    ),
    Mutation(
        "S7", "the owner's next writes do not wait for the broadcast",
        "kvpp_core/pipeline.py",
        WAIT_FOR_TRANSFER, "",
        f"{S07}::test_a_broadcast_has_nothing_of_what_is_written_after_its_step",
    ),
    Mutation(
        "S8", "ranks do not compare their manifests' owners",
        "kvpp_core/manifest.py",
        '                    "owner": owner,\n', "",
        f"{S08}::test_ranks_that_differ_all_refuse_and_name_the_field_and_both_values",
    ),
    Mutation(
        "S8", "active blocks come in the order of a rank's requests",
        "kvpp_core/history.py",
        "        return tuple(sorted(set(chain.from_iterable(found))))\n",
        "        return tuple(dict.fromkeys(chain.from_iterable(found)))\n",
        f"{S08}::test_ranks_send_the_same_blocks_whatever_the_order_of_their_requests",
    ),
    Mutation(
        "S8", "a rank that owns nothing takes a step with loads for one without",
        "kvpp_connectors/pool/modes/layerwise.py",
        "        return self._fences if self._jobs else None\n",
        "        return self._fences or None\n",
        f"{S08}::test_a_step_is_guarded_on_all_ranks_or_none",
    ),
    Mutation(
        "S9", "a preemption does not wait for saves",
        "kvpp_connectors/pool/saves.py",
        "        _, late = wait(copied, self._hold_timeout_s)\n",
        "        late: set[Future[None]] = set()\n",
        f"{S09}::test_blocks_are_given_up_when_no_save_reads_them_any_more",
    ),
    Mutation(
        "S9", "a save says that it has read its blocks before it has",
        "kvpp_connectors/pool/block_objects.py",
        "                if number == len(batches):\n", "                if number == 1:\n",
        f"{S09}::test_a_save_has_read_its_blocks_when_it_says_so",
    ),
    Mutation(
        "S9", "workers do not hear of preempted requests",
        "kvpp_connectors/pool/scheduler.py",
        "                step.preempted.append(life)\n", "                pass\n",
        f"{S09}::test_preempted_requests_are_saved_from_their_own_blocks_or_not_at_all",
    ),
    Mutation(
        "S9", "a preempted request is saved from blocks that were its own",
        "kvpp_connectors/pool/requests.py",
        "        self.blocks, self._loaded, self._offered, self._computed = [], range(0), 0, 0\n"
        "        self._filled.clear()\n\n",
        "\n",
        "tests/pool/test_tracking.py::test_nothing_of_a_preempted_request_is_told",
    ),
    Mutation(
        "S9", "a block is saved while another request computes it anew",
        "kvpp_connectors/pool/invalid_blocks.py",
        "                self._rewritten[block] = step\n", "",
        "tests/pool/test_scheduler.py"
        "::test_a_block_that_another_request_computes_anew_is_saved_when_that_has_ended",
    ),
    Mutation(
        "S9", "a life of a request is taken for another of the same id",
        "kvpp_connectors/pool/saves.py",
        "self._running.setdefault(life, [])",
        "self._running.setdefault(Life(life.request_id, 0), [])",
        f"{S09}::test_saves_of_an_ended_life_and_of_the_next_are_counted_apart",
    ),
    Mutation(
        "S10", "a slot is refilled while its last reader still reads",
        "kvpp_core/pipeline.py",
        WAIT_FOR_COMPUTE, "",
        f"{S10}::test_a_slot_is_not_refilled_before_its_late_reader_is_done",
    ),
    Mutation(
        "S10", "an owner overwrites what is still being sent",
        "kvpp_core/pipeline.py",
        WAIT_FOR_TRANSFER, "",
        f"{S10}::test_the_owner_does_not_overwrite_a_layer_before_its_broadcast_has_ended",
    ),
    Mutation(
        "S11", "the split over ranks is not part of an object's name",
        "kvpp_connectors/pool/keys.py",
        '@{self.topology.name}"', '@one"',
        f"{S11}::test_engines_of_unlike_bytes_have_no_key_in_common",
    ),
    Mutation(
        "S11", "an engine's facts are not part of an object's name",
        "kvpp_connectors/pool/keys.py",
        "@{self.fingerprint.digest()}@", "@same@",
        f"{S11}::test_engines_that_save_the_same_hashes_at_once_get_their_own_bytes_back",
    ),
    Mutation(
        "S11", "an object of another key is taken for one's own",
        "kvpp_connectors/pool/block_objects.py",
        "return outcome if wrong is None else StoreOutcome(StoreResult.FOREIGN, words=wrong)",
        "return outcome",
        f"{S11}::test_a_foreign_object_is_never_loaded",
    ),
    Mutation(
        "S12", "a pull's reads are one block off",
        "kvpp_connectors/p2p/read_plan.py",
        "                    theirs.base + remote_blocks[start] * theirs.stride,",
        "                    theirs.base + max(remote_blocks[start] - 1, 0) * theirs.stride,",
        f"{S12}::test_a_pull_changes_what_it_should_and_no_other_byte",
    ),
    Mutation(
        "S12", "a packed broadcast is put into its blocks in another order",
        "kvpp_core/transfer.py",
        "rows.index_copy_(0, self.ids, place)", "rows.index_copy_(0, self.ids.flip(0), place)",
        f"{S12}::test_a_broadcast_changes_what_it_should_and_no_other_byte",
    ),
    Mutation(
        "S12", "a pool's object holds the block before",
        "kvpp_connectors/pool/packing.py",
        "rows.data_ptr() + block * rows", "rows.data_ptr() + max(block - 1, 0) * rows",
        f"{S12}::test_a_save_and_a_load_move_what_they_should_and_no_other_byte",
    ),
]  # fmt: skip
