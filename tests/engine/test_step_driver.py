"""A worker's steps without an engine: real pipelines over two gloo ranks, the scheduler's decisions
made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from kvpp_connectors.engine.step_driver import StepDriver
from kvpp_core.device.base import Fence
from kvpp_core.errors import KvppError, PipelineClosed
from kvpp_core.history import ScheduledRequest, ScheduledStep
from kvpp_core.trace import Lane, SpanRecorder
from tests.core.gloo_world import GlooWorld, Rank
from tests.core.rig import ACTIVE, Rig, rig

BLOCK = 4  # tokens
HISTORY = len(ACTIVE) * BLOCK  # tokens that the active blocks hold


@pytest.fixture(scope="module")
def world() -> Iterator[GlooWorld]:
    """Two ranks; rank 0 keeps layers 0 to 3 of 8, rank 1 the others."""
    world = GlooWorld(2)
    yield world
    world.close()


def chunk(computed: int = HISTORY, new: int = 3) -> ScheduledRequest:
    """A request over the active blocks with this history and so many tokens to come."""
    return ScheduledRequest("chunk", ACTIVE, computed, new, replaces=True)


def decode(name: str = "decode") -> ScheduledRequest:
    """A request over the active blocks that adds one token."""
    return ScheduledRequest(name, ACTIVE, HISTORY, 1, replaces=True)


class Loads:
    """A connector whose loads of layers are in these fences."""

    def __init__(self, fences: Mapping[int, Fence] | None) -> None:
        self.fences = fences
        self.layers: list[int] = []
        self.failures: list[tuple[int, bool]] = []

    def take_fences(self) -> Mapping[int, Fence] | None:
        fences, self.fences = self.fences, None
        return fences

    def reached(self, layer: int) -> None:
        self.layers.append(layer)

    def failed(self, layer: int, late: bool) -> None:
        self.failures.append((layer, late))


def driver_of(r: Rig, loads: Loads | None = None, **options: Any) -> StepDriver:
    """A driver over a rig's pipeline."""
    layer_of = {
        component.name: bundle.layer
        for bundle in r.memory.placement.bundles
        for component in bundle.components
    }
    spans = options.pop("spans", SpanRecorder())
    return StepDriver(r.pipeline, BLOCK, layer_of, lambda: loads, spans, **options)


def forward(r: Rig, driver: StepDriver, *, history: bool = True) -> None:
    """Touch every layer as the model does, and read its history."""
    for ordinal in range(r.layers):
        driver.acquire(r.component(ordinal, -1))
        if history:
            r.read(ordinal, generation=1)


def run(r: Rig, driver: StepDriver, *requests: ScheduledRequest) -> int:
    """One whole step; the broadcasts that it made."""
    before = sum(r.pipeline.stats.broadcasts.values())
    driver.announce(ScheduledStep(requests))
    driver.begin()
    forward(r, driver, history=any(request.computed_tokens for request in requests))
    driver.end()
    return sum(r.pipeline.stats.broadcasts.values()) - before


def whole_steps(rank: Rank) -> list[int]:
    """Steps with history, without, with history again."""
    with rig(rank, "cpu") as r:
        driver = driver_of(r)
        made = [run(r, driver, chunk()), run(r, driver, chunk(0)), run(r, driver, chunk())]
        assert r.complaints() == []
        assert r.pipeline.stats.steps == 3
        return made


def test_a_step_with_history_broadcasts_every_layer_and_one_without_none(world: GlooWorld) -> None:
    assert world.run(whole_steps) == [[8, 0, 8]] * 2


def runs_that_are_no_steps(rank: Rank) -> tuple[int, int]:
    """Dummy forwards before and between steps; a step without a forward; two forwards in one."""
    with rig(rank, "cpu") as r:
        driver = driver_of(r)
        for _ in range(2):
            driver.begin()  # a dummy run: nobody announced it
            for ordinal in range(r.layers):
                driver.acquire(r.component(ordinal))
        driver.announce(ScheduledStep())  # saves under way, no token to compute
        driver.end()
        steps = r.pipeline.stats.steps
        driver.announce(ScheduledStep([chunk()]))
        driver.begin()
        driver.begin()
        forward(r, driver)
        driver.end()
        driver.begin()  # after the step: a dummy run again
        assert r.complaints() == []
        return steps, r.pipeline.stats.steps


def test_only_the_forward_of_an_announced_step_begins_one(world: GlooWorld) -> None:
    assert world.run(runs_that_are_no_steps) == [(0, 1)] * 2


def errors_in_a_forward(rank: Rank) -> str:
    """Give steps up before, in and after the layers; the next one is right."""
    with rig(rank, "cpu") as r:
        driver = driver_of(r)
        for layers in (0, 1, 5, r.layers):
            driver.announce(ScheduledStep([chunk()]))
            driver.begin()
            for ordinal in range(layers):
                driver.acquire(r.component(ordinal, -1))
            driver.abort()
            assert r.group.in_flight == 0
        driver.announce(ScheduledStep([chunk()]))
        driver.abort()  # vLLM failed before its forward
        run(r, driver, chunk())
        assert r.complaints() == []
        driver.announce(ScheduledStep([chunk(HISTORY + 1)]))
        with pytest.raises(KvppError) as caught:
            driver.begin()
        driver.abort()
        run(r, driver, chunk())
        assert r.complaints() == []
        return str(caught.value)


def test_a_step_that_fails_leaves_nothing_in_flight_and_the_next_is_right(
    world: GlooWorld,
) -> None:
    said = world.run(errors_in_a_forward)
    assert said == ["request chunk has 13 computed tokens, which take 4 blocks of 4 tokens, but "
                    "holds 3"] * 2  # fmt: skip


def a_request_that_nobody_announced(rank: Rank) -> str:
    """The step continues a request whose start this worker never saw."""
    with rig(rank, "cpu") as r:
        driver = driver_of(r)
        odd = ScheduledRequest("odd", (), HISTORY, 1, replaces=False)
        with pytest.raises(KvppError) as caught:
            driver.announce(ScheduledStep([odd]))
        driver.begin()
        driver.end()
        run(r, driver, chunk())
        assert r.complaints() == []
        return str(caught.value)


def test_a_step_that_cannot_be_announced_does_not_run(world: GlooWorld) -> None:
    assert all("request odd goes on" in said for said in world.run(a_request_that_nobody_announced))


def decodes_at_the_owner(rank: Rank) -> list[tuple[int, int | None]]:
    """Broadcasts, and the decode tokens that rely on the owners, of four kinds of step."""
    with rig(rank, "cpu") as r:
        driver = driver_of(r, owner_decode=True)
        found: list[tuple[int, int | None]] = []
        for requests in ([decode()], [decode("a"), decode("b"), chunk()], [chunk()], [chunk(0)]):
            before = sum(r.pipeline.stats.broadcasts.values())
            driver.announce(ScheduledStep(requests))
            assert driver.decode_tokens() is None  # what vLLM runs before the forward
            driver.begin()
            tokens = driver.decode_tokens()
            for ordinal in range(r.layers):
                driver.acquire(r.component(ordinal, -1))
            driver.end()
            assert driver.decode_tokens() is None
            found.append((sum(r.pipeline.stats.broadcasts.values()) - before, tokens))
        return found


def test_decodes_at_the_owner_move_no_history(world: GlooWorld) -> None:
    assert world.run(decodes_at_the_owner) == [[(0, 1), (8, 2), (8, 0), (0, 0)]] * 2


def loads_in_a_step(rank: Rank) -> tuple[list[int], int | None, list[tuple[int, bool]]]:
    """Layer 2 is loaded well, layer 5 fails; decodes then rely on broadcasts."""
    with rig(rank, "cpu") as r:
        fences: dict[int, Fence] = {}
        layers = [bundle.layer for bundle in r.memory.placement.bundles]
        good: Future[None] = Future()
        bad: Future[None] = Future()
        if r.owns(2):
            fences[layers[2]] = good
            r.load(2, 1, good)
        if r.owns(5):
            fences[layers[5]] = bad
            bad.set_exception(OSError("the store is gone"))
        loads = Loads(fences)
        driver = driver_of(r, loads, owner_decode=True)
        driver.announce(ScheduledStep([decode()]))
        driver.begin()
        tokens = driver.decode_tokens()
        for ordinal in range(r.layers):
            driver.acquire(r.component(ordinal, -1))
        driver.end()
        assert loads.layers == layers
        return (
            [layers.index(layer) for layer, _ in loads.failures],
            tokens,
            [(layers.index(layer), late) for layer, late in loads.failures],
        )


def test_a_step_with_loads_is_broadcast_and_every_rank_hears_of_a_failure(
    world: GlooWorld,
) -> None:
    assert world.run(loads_in_a_step) == [([5], None, [(5, False)])] * 2


def recorded_steps(rank: Rank) -> list[tuple[str, dict[str, int | str]]]:
    """What a step leaves in the trace."""
    with rig(rank, "cpu") as r:
        spans = SpanRecorder()
        driver = driver_of(r, spans=spans)
        spans.start(10)
        run(r, driver, chunk())
        run(r, driver, decode())
        run(r, driver, chunk(0), decode())
        return [
            (span.name, dict(span.facts))
            for step in spans.take().steps
            for span in step.spans
            if span.lane is Lane.COMPUTE and span.layer is None
        ]


def test_a_step_is_recorded_with_its_kind_and_its_size(world: GlooWorld) -> None:
    for found in world.run(recorded_steps):
        assert found == [
            ("prefill", {"tokens": 3, "requests": 1, "blocks": 3}),
            ("decode", {"tokens": 1, "requests": 1, "blocks": 3}),
            ("mixed", {"tokens": 4, "requests": 2, "blocks": 3}),
        ]


def after_the_end(rank: Rank) -> str:
    """Close the pipeline while the driver is still called."""
    with rig(rank, "cpu") as r:
        driver = driver_of(r)
        run(r, driver, chunk())
        r.pipeline.close()
        driver.announce(ScheduledStep([chunk()]))
        with pytest.raises(PipelineClosed) as caught:
            driver.begin()
        driver.abort()
        return str(caught.value)


def test_no_step_begins_after_the_close(world: GlooWorld) -> None:
    assert all("closed" in said for said in world.run(after_the_end))
