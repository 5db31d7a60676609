"""What the recorder keeps, and what pipeline and transfer record.

Two gloo ranks; rank 0 keeps layers 0..3, rank 1 layers 4..7.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from itertools import pairwise

import pytest

from kvpp_core.policy import BroadcastPolicy
from kvpp_core.stats import PipelineStats
from kvpp_core.trace import BroadcastSpans, Lane, Recording, Span, SpanRecorder
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rig import ACTIVE, DEVICES, PATIENCE, DeviceKind, Rig, rig

LAYERS = 8
PACKED = BroadcastPolicy.PACKED
PIECES = {
    BroadcastPolicy.FULL: (["send"], ["send"]),
    BroadcastPolicy.RUNS: (["send"], ["send"]),
    BroadcastPolicy.PACKED: (["pack", "send"], ["send", "unpack"]),
}


def add(recorder: SpanRecorder, begin: int) -> None:
    recorder.add(Lane.LOAD, "load", begin, begin + 1, layer=3, bytes=8)


def test_nothing_is_kept_before_start_and_after_take() -> None:
    recorder = SpanRecorder()
    recorder.begin_step(time.monotonic_ns())
    add(recorder, 10**18)
    assert recorder.take() == Recording([], 0)
    recorder.start(2)
    recorder.begin_step(0)
    assert len(recorder.take().steps) == 1
    add(recorder, 10**18)
    assert recorder.take() == Recording([], 0)


def test_the_last_steps_are_kept_and_what_is_dropped_is_counted() -> None:
    recorder = SpanRecorder()
    recorder.start(steps=2, most_spans=3)
    add(recorder, 10**18)  # before the first step
    for _ in range(4):
        recorder.begin_step(time.monotonic_ns())
        for _ in range(5):
            add(recorder, 10**18)
    taken = recorder.take()
    assert [step.number for step in taken.steps] == [2, 3]
    assert [len(step.spans) for step in taken.steps] == [3, 3]
    assert taken.dropped == 1 + 4 * 2 + 2 * 3


def test_a_span_belongs_to_the_step_in_which_it_began() -> None:
    """A save ends when later steps run."""
    recorder = SpanRecorder()
    recorder.start(2)
    recorder.begin_step(100)
    recorder.begin_step(200)
    for begin in (99, 199, 200, 300):
        add(recorder, begin)
    taken = recorder.take()
    assert [[s.begin for s in step.spans] for step in taken.steps] == [[199], [200, 300]]
    assert taken.dropped == 1


def test_operations_are_left_alone_while_nothing_is_recorded() -> None:
    spans = BroadcastSpans(SpanRecorder(), 0, 0, "packed")

    def op() -> None: ...

    assert spans.timed("pack", op, 1, 1) is op
    assert spans.sending(1, 1) is None


def test_a_send_ends_once() -> None:
    """Its future and the stream both tell of its end, from two threads."""
    recorder = SpanRecorder()
    recorder.start(1)
    recorder.begin_step(time.monotonic_ns())
    ended = BroadcastSpans(recorder, 5, 1, "full").sending(64, 2)
    assert ended is not None
    threads = [threading.Thread(target=ended) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queued, send = recorder.take().steps[0].spans
    assert (queued.name, send.name) == ("queued", "send")
    assert queued.end == send.begin
    assert send.facts == {"owner": 1, "mode": "full", "bytes": 64, "blocks": 2}


def recorded(r: Rig) -> list[Span]:
    """The spans of one good step."""
    r.pipeline._spans.start(1)
    r.pipeline._spans.begin_step(time.monotonic_ns())
    r.step(1)
    taken = r.pipeline._spans.take()
    assert taken.dropped == 0
    return taken.steps[0].spans


def steps(
    rank: Rank, kind: DeviceKind, policy: BroadcastPolicy
) -> tuple[list[Span], PipelineStats, list[int]]:
    """A step that is not recorded and one that is: spans, counters, bytes of its messages."""
    with rig(rank, kind, policy=policy) as r:
        r.step(1)
        assert not r.pipeline._spans.take().steps
        r.pipeline.stats, r.group.sent[:] = PipelineStats(), []
        spans = recorded(r)
        assert r.complaints() == []
        return spans, r.pipeline.stats, [size for size, _ in r.group.sent]


def of(spans: list[Span], lane: Lane, layer: int | None = None) -> list[Span]:
    """In the order in which they began."""
    found = [s for s in spans if s.lane is lane and layer in (None, s.layer)]
    return sorted(found, key=lambda span: span.begin)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("policy", PIECES)
def test_the_waits_are_those_that_are_counted(
    world2: GlooWorld, kind: DeviceKind, policy: BroadcastPolicy
) -> None:
    for spans, stats, _ in world2.run(steps, kind, policy):
        waits = of(spans, Lane.WAIT)
        assert [wait.layer for wait in waits] == list(range(LAYERS))
        assert {w.layer: w.end - w.begin for w in waits} == stats.layer_wait_ns
        assert sum(w.end - w.begin for w in waits) == stats.wait_ns > 0
        assert stats.wait_seconds == stats.wait_ns / 1e9
        assert sum(stats.snapshot()["layer_wait_seconds"].values()) == pytest.approx(  # type: ignore[union-attr]
            stats.wait_seconds
        )


@pytest.mark.parametrize("policy", PIECES)
def test_the_pieces_of_a_broadcast(world2: GlooWorld, policy: BroadcastPolicy) -> None:
    """In order, one behind the other, over before the layer is computed."""
    for rank, (spans, _, _) in enumerate(world2.run(steps, "cpu", policy)):
        for layer in range(LAYERS):
            pieces = of(spans, Lane.BROADCAST, layer)
            owns = rank == layer // 4
            messages = (len(pieces) - 1) // 2 if policy is PACKED else 1
            expected = ["queued", *PIECES[policy][not owns] * messages]
            assert [piece.name for piece in pieces] == expected
            assert all(before.end <= after.begin for before, after in pairwise(pieces))
            assert {piece.facts["owner"] for piece in pieces} == {layer // 4}
            assert {piece.facts["mode"] for piece in pieces[1:]} == {policy.value}
            (compute,) = [s for s in of(spans, Lane.COMPUTE, layer) if s.name == "layer"]
            assert pieces[-1].end <= compute.begin
        computes = of(spans, Lane.COMPUTE)
        assert all(before.end <= after.begin for before, after in pairwise(computes))
        assert len(computes) == 2 * LAYERS  # each launched, and computed


def test_bytes_and_blocks_are_those_that_were_sent(world2: GlooWorld) -> None:
    for spans, stats, sent in world2.run(steps, "cpu", BroadcastPolicy.PACKED):
        sends = [s for s in of(spans, Lane.BROADCAST) if s.name == "send"]
        assert [s.facts["bytes"] for s in sends] == sent
        assert sum(sent) == stats.active_history_bytes
        assert sum(int(s.facts["blocks"]) for s in sends) == LAYERS * len(ACTIVE)


def test_a_layer_is_sent_while_the_one_before_is_computed(world2: GlooWorld) -> None:
    for spans, _, _ in world2.run(steps, "cpu", BroadcastPolicy.FULL):
        for layer in range(LAYERS - 1):
            (compute,) = [s for s in of(spans, Lane.COMPUTE, layer) if s.name == "layer"]
            begun = of(spans, Lane.BROADCAST, layer + 1)[0].begin
            assert of(spans, Lane.WAIT, layer)[0].end <= begun <= compute.end


def loaded(rank: Rank) -> tuple[list[Span], list[int]]:
    """A guarded step in which rank 0 loads layer 2; its spans, and when the load was done."""
    with rig(rank, "cpu", policy=BroadcastPolicy.FULL) as r:
        fence: Future[None] = Future()
        fences = {2: fence} if rank.rank == 0 else {}
        r.pipeline._spans.start(1)
        r.pipeline._spans.begin_step(time.monotonic_ns())
        r.pipeline.begin(ACTIVE, fences, guarded=True)
        r.forward(1, 0, 2)
        done: list[int] = []
        if rank.rank == 0:
            r.memory.store(2, 1, ACTIVE)
            done.append(time.monotonic_ns())
            fence.set_result(None)
        r.forward(1, 2)
        r.pipeline.end()
        assert r.complaints() == []
        return r.pipeline._spans.take().steps[0].spans, done


def test_a_layer_that_is_loaded_is_queued_until_then(world2: GlooWorld) -> None:
    """Submitted when layer 1 begins, held back while it is computed, sent after the load."""
    spans, load = world2.run(loaded)[0]
    queued, send = of(spans, Lane.BROADCAST, 2)
    (compute,) = [s for s in of(spans, Lane.COMPUTE, 1) if s.name == "layer"]
    assert queued.begin <= compute.begin < load[0] <= queued.end == send.begin


def hidden(rank: Rank) -> tuple[list[Span], int]:
    """A step in which layer 1 has come while layer 0 is still computed; and when that was seen."""
    with rig(rank, "cpu", policy=BroadcastPolicy.FULL) as r:
        r.pipeline._spans.start(1)
        r.pipeline._spans.begin_step(time.monotonic_ns())
        r.pipeline.begin(ACTIVE)
        r.forward(1, 0, 1)
        deadline = time.monotonic() + PATIENCE
        while r.group.in_flight and time.monotonic() < deadline:
            time.sleep(0.001)
        seen = time.monotonic_ns()
        r.forward(1, 1)
        r.pipeline.end()
        return r.pipeline._spans.take().steps[0].spans, seen


def test_a_send_that_nobody_waits_for_ends_when_its_bytes_are_there(world2: GlooWorld) -> None:
    """Not when the forward comes to look."""
    for spans, seen in world2.run(hidden):
        assert of(spans, Lane.BROADCAST, 1)[-1].end <= seen < of(spans, Lane.WAIT, 1)[0].begin
