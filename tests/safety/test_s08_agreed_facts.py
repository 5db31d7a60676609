"""S8: what decides a collective or a shape comes from facts that the group agreed on.

Two real gloo ranks. Before the first broadcast they compare manifest and run, and refuse what
differs; in a step they decide alike, from the scheduler's output, which blocks are sent, in how
many messages, and whether load status is. Injected: every fact different on one rank, requests in
another order on one rank, a rank that has nothing to load. Field reports 3.2, 3.3.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpp_connectors.vllm_api.scheduler_output import read_step
from kvpp_core.errors import ManifestMismatch
from kvpp_core.group import make_group
from kvpp_core.history import BlockHistory
from kvpp_core.manifest import agree
from kvpp_core.policy import BroadcastPolicy
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rank_memory import uneven_model
from tests.core.rig import ACTIVE, assert_right, make_rig
from tests.core.test_manifest import DIFFERENT, MANIFEST

RUN: dict[str, str | int | float | bool] = {"num_blocks": 100, "broadcast": "auto", "staging": 0}


def agree_in_world(rank: Rank) -> dict[str, str]:
    """Compare all DIFFERENT manifests, a different run fact and equal ones, one after another."""
    group = make_group([[0, 1]], rank.rank, "gloo", 30.0)
    said = {}
    for name, (other, *_) in DIFFERENT.items():
        manifest = MANIFEST if rank.rank == 0 else other
        with pytest.raises(ManifestMismatch) as error:
            agree(manifest, RUN, group.ranks, group.all_gather_bytes)
        said[name] = str(error.value)
    with pytest.raises(ManifestMismatch) as error:
        run = RUN | ({"num_blocks": 99} if rank.rank else {})
        agree(MANIFEST, run, group.ranks, group.all_gather_bytes)
    said["run"] = str(error.value)
    agree(MANIFEST, RUN, group.ranks, group.all_gather_bytes)
    rank.barrier()
    group.close()
    return said


def test_ranks_that_differ_all_refuse_and_name_the_field_and_both_values(
    world2: GlooWorld,
) -> None:
    """And ranks that agree go on, in the same group, after all those refusals."""
    said = world2.run(agree_in_world)
    assert said[0] == said[1]
    for name, (_, path, left, right) in DIFFERENT.items():
        assert (
            f"the ranks of KVPP group [0, 1] do not agree on {path}: "
            f"rank 0 has {left}, rank 1 has {right}. " in said[0][name]
        )
    assert "do not agree on run.num_blocks: rank 0 has 100, rank 1 has 99" in said[0]["run"]


# What requests hold, of 6 blocks of 4 tokens: blocks, computed tokens, new tokens.
REQUESTS: dict[str, tuple[list[int], int, int]] = {
    "a": ([4, 1], 8, 4),
    "b": ([0, 3], 4, 4),  # its second block holds nothing yet
    "c": ([1, 0], 6, 2),  # shares both
}


def scheduled(names: list[str]) -> Any:
    """A SchedulerOutput in which the requests come in this order."""
    new = [
        SimpleNamespace(req_id=n, block_ids=(REQUESTS[n][0],), num_computed_tokens=REQUESTS[n][1])
        for n in names
    ]
    nobody = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    return SimpleNamespace(
        num_scheduled_tokens={name: REQUESTS[name][2] for name in names},
        scheduled_new_reqs=new,
        scheduled_cached_reqs=nobody,
        finished_req_ids=set(),
    )


def shuffled_step(rank: Rank, policy: BroadcastPolicy) -> tuple[tuple[int, ...], int, list[str]]:
    """A step whose requests rank 1 finds in another order."""
    names = sorted(REQUESTS, reverse=rank.rank == 1)
    history, step = BlockHistory(4), read_step(scheduled(names))
    history.observe(step)
    active = history.active(step.requests)
    r = make_rig(rank, "cpu", policy=policy)
    r.pipeline.begin(active)
    for ordinal in range(r.layers):
        r.acquire(ordinal)
        r.read(ordinal, 1, ACTIVE)
    r.pipeline.end()
    complaints = r.complaints()
    rank.barrier()
    r.close()
    return active, len(r.group.sent), complaints


@pytest.mark.parametrize("policy", list(BroadcastPolicy))
def test_ranks_send_the_same_blocks_whatever_the_order_of_their_requests(
    world2: GlooWorld, policy: BroadcastPolicy
) -> None:
    """Blocks decide how many messages there are, and which bytes of them are whose."""
    (blocks, sent, complaints), other = world2.run(shuffled_step, policy)
    assert blocks == ACTIVE and sent
    assert other[:2] == (blocks, sent)
    assert_right([complaints, other[2]])


def half_loaded_step(rank: Rank, layers: int, loads: bool) -> tuple[bool, list[int], list[str]]:
    """A step in which the ranks load what they own, if the step loads anything."""
    from tests.safety.layer_pool import NAMESPACE, job_of, layer_pool  # vLLM: takes seconds

    told: list[int] = []
    r = make_rig(rank, "cpu", model=uneven_model(layers), timeout=5.0)
    with layer_pool(r.memory) as pool:
        job = job_of(ACTIVE)
        pool.save(job)
        pool.loads.start(NAMESPACE, [job] if loads else [])
        fences = pool.loads.take_fences()
        guarded = fences is not None
        r.pipeline.begin(
            ACTIVE, fences, guarded=guarded, on_load_failed=lambda layer, late: told.append(layer)
        )
        for ordinal in range(layers):
            pool.loads.reached(ordinal)
            r.acquire(ordinal)
            r.read(ordinal, 1)
        r.pipeline.end()
    complaints = r.complaints()
    rank.barrier()
    r.close()
    return guarded, told, complaints


@pytest.mark.parametrize("loads", [False, True], ids=["no loads", "loads"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_step_is_guarded_on_all_ranks_or_none(
    world2: GlooWorld, layers: int, loads: bool
) -> None:
    """With one layer rank 1 owns nothing and loads nothing; it hears the owner's status still."""
    assert world2.run(half_loaded_step, layers, loads) == [(loads, [], [])] * 2
