"""The order of calls that the pipeline accepts, and what it says about others.

Two gloo ranks; rank 0 keeps layers 0..3, rank 1 layers 4..7.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import pytest
import torch

from kvpp_core.errors import AcquireOrderError, PipelineClosed, PlanError
from kvpp_core.policy import BroadcastPolicy
from kvpp_core.transfer import BundleTransfer
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rig import ACTIVE, DEVICES, NUM_BLOCKS, DeviceKind, rig


def _message(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


def wrong_orders(rank: Rank, kind: DeviceKind) -> dict[str, str]:
    """Acquire what is not due; afterwards the step goes on, and the next one is right."""
    with rig(rank, kind) as r:
        said: dict[str, str] = {}
        r.pipeline.begin(ACTIVE)
        said["first"] = _message(AcquireOrderError, lambda: r.acquire(3))
        r.forward(1, 0, 2)
        said["skip"] = _message(AcquireOrderError, lambda: r.acquire(3))
        said["back"] = _message(AcquireOrderError, lambda: r.acquire(0))
        for unknown in ("layers.99.attn", "mtp.attn"):
            touch = partial(r.pipeline.acquire, unknown)
            said[unknown] = _message(AcquireOrderError, touch)
        r.forward(1, 2)
        said["after the last"] = _message(AcquireOrderError, lambda: r.acquire(0))
        r.pipeline.end()
        r.step(1)
        assert r.complaints() == []
        return said


def layers_left_out(rank: Rank, kind: DeviceKind) -> str:
    """End a step after 3 of 8 layers, with the fourth in flight; the next one is right."""
    with rig(rank, kind) as r:
        r.pipeline.begin(ACTIVE)
        r.forward(1, 0, 3)
        said = _message(AcquireOrderError, r.pipeline.end)
        assert r.group.in_flight == 0
        r.step(1)
        assert r.complaints() == []
        return said


def components_of_one_bundle(rank: Rank, kind: DeviceKind) -> list[str]:
    """Touch the components of layers with an indexer in all orders and again."""
    with rig(rank, kind) as r:
        r.pipeline.begin(ACTIVE)
        for ordinal in range(r.layers):
            names = [c.name for c in r.memory.placement.bundles[ordinal].components]
            r.pipeline.acquire(names[-1] if ordinal % 2 else names[0])
            r.settle()
            before = r.pipeline.stats.snapshot()
            for name in (*names, *reversed(names)):
                r.pipeline.acquire(name)
            assert r.pipeline.stats.snapshot() == before
            r.read(ordinal, generation=1)
        r.pipeline.end()
        return r.complaints()


def refusals(rank: Rank, kind: DeviceKind) -> list[str]:
    """Begin and end where they are not allowed; a refused begin() leaves no step behind."""
    with rig(rank, kind) as r:
        pipeline = r.pipeline
        said = [
            _message(PipelineClosed, pipeline.end),
            _message(PlanError, lambda: pipeline.begin(ACTIVE, {0: Future()})),
            _message(PlanError, lambda: pipeline.begin((0, NUM_BLOCKS))),
            _message(PlanError, lambda: pipeline.begin((-1, 0))),
        ]
        assert not pipeline.in_step
        assert pipeline.stats.steps == 0
        pipeline.abort()  # without a step: nothing to do
        pipeline.begin(ACTIVE)
        said.append(_message(PipelineClosed, lambda: pipeline.begin(ACTIVE)))
        r.forward(1)
        pipeline.end()
        assert r.complaints() == []
        pipeline.close()
        said.append(_message(PipelineClosed, lambda: pipeline.begin(ACTIVE)))
        said.append(_message(PipelineClosed, lambda: r.acquire(0)))
        said.append(_message(PipelineClosed, pipeline.end))
        pipeline.close()
        return said


def change_policy(rank: Rank, kind: DeviceKind) -> list[dict[str, int]]:
    """Steps under three policies, changed between them; not inside one."""
    with rig(rank, kind, policy=BroadcastPolicy.FULL) as r:
        r.step(1)
        seen = [dict(r.pipeline.stats.broadcasts)]
        for policy in (BroadcastPolicy.PACKED, BroadcastPolicy.RUNS):
            r.pipeline.set_policy(policy)
            r.pipeline.begin(ACTIVE)
            _message(PipelineClosed, lambda: r.pipeline.set_policy(BroadcastPolicy.FULL))
            r.forward(1)
            r.pipeline.end()
            seen.append(dict(r.pipeline.stats.broadcasts))
        assert r.complaints() == []
        return [{mode.value: count for mode, count in counts.items()} for counts in seen]


def wrong_memory(rank: Rank, kind: DeviceKind) -> list[str]:
    """Give a transfer a buffer that is too small, has two dimensions, or is not of bytes."""
    with rig(rank, kind) as r:
        size, staging = r.memory.layout.size, torch.empty(0, dtype=torch.uint8)
        buffers = [
            torch.empty(size - 1, dtype=torch.uint8),
            torch.empty(1, size, dtype=torch.uint8),
            torch.empty(size, dtype=torch.int16),
        ]
        make = partial(BundleTransfer, r.memory.layout)
        rest = (staging, r.group, r.device.transfer)
        return [_message(PlanError, partial(make, buffer, *rest)) for buffer in buffers]


def no_history(rank: Rank, kind: DeviceKind) -> list[int]:
    """Forwards without history, in any order, begun or not (dummy and profiling runs)."""
    with rig(rank, kind) as r:
        for begun in (False, True):
            if begun:
                r.pipeline.begin(())
            for ordinal in (5, 0, 0, 7):
                r.acquire(ordinal)
            if begun:
                r.pipeline.end()
        stats = r.pipeline.stats
        return [len(r.group.sent), stats.steps_with_history, sum(stats.broadcasts.values())]


@pytest.mark.parametrize("kind", DEVICES)
def test_a_layer_out_of_order_is_an_error_that_names_both(
    world2: GlooWorld, kind: DeviceKind
) -> None:
    said = world2.run(wrong_orders, kind)
    assert said[0] == said[1]
    expected = {
        "first": "layer 3 (layers.3.attn) was touched after the start of the step; "
        "expected layer 0",
        "skip": "layer 3 (layers.3.attn) was touched after layer 1; expected layer 2",
        "back": "layer 0 (layers.0.indexer.scale) was touched after layer 1; expected layer 2",
        "layers.99.attn": "'layers.99.attn' is no cache of a target layer of this rank",
        "mtp.attn": "'mtp.attn' is no cache of a target layer of this rank",
        "after the last": "layer 0 (layers.0.indexer.scale) was touched after layer 7; "
        "expected the last layer",
    }
    for case, message in expected.items():
        if case not in ("first", "skip"):  # there the component acquired is the last one
            assert said[0][case] == message
        assert message.split(" (")[0] in said[0][case]
        assert message.split(" was touched")[-1] in said[0][case]


@pytest.mark.parametrize("kind", DEVICES)
def test_a_step_that_leaves_layers_out_is_an_error_that_names_the_first(
    world2: GlooWorld, kind: DeviceKind
) -> None:
    said = world2.run(layers_left_out, kind)
    assert said[0] == said[1]
    assert "without touching the cache of layer 3; 5 of 8 target layers were left out" in said[0]


@pytest.mark.parametrize("kind", DEVICES)
def test_the_first_component_of_a_bundle_readies_all_and_the_others_are_free(
    world2: GlooWorld, kind: DeviceKind
) -> None:
    """S5: an indexer may come before its main cache, or after it."""
    assert world2.run(components_of_one_bundle, kind) == [[], []]


@pytest.mark.parametrize("kind", DEVICES)
def test_begin_and_end_are_refused_where_they_do_not_belong(
    world2: GlooWorld, kind: DeviceKind
) -> None:
    for said in world2.run(refusals, kind):
        for message, expected in zip(
            said,
            ["outside a step", "guarded", "0..6", "-1..0", "step", "closed", "closed", "CLOSED"],
            strict=True,
        ):
            assert expected in message


@pytest.mark.parametrize("kind", DEVICES)
def test_the_policy_changes_between_steps_and_not_inside_one(
    world2: GlooWorld, kind: DeviceKind
) -> None:
    full, packed, runs = {"full": 8}, {"packed": 8}, {"runs": 8}
    expected = [full, full | packed, full | packed | runs]
    assert world2.run(change_policy, kind) == [expected, expected]


def test_memory_that_does_not_fit_the_layout_is_refused(world2: GlooWorld) -> None:
    for said in world2.run(wrong_memory, "cpu"):
        assert all("the KV memory must be" in message for message in said)


@pytest.mark.parametrize("kind", DEVICES)
def test_forwards_without_history_move_nothing_and_check_nothing(
    world2: GlooWorld, kind: DeviceKind
) -> None:
    assert world2.run(no_history, kind) == [[0, 0, 0], [0, 0, 0]]
