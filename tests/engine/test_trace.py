"""What `benchmarks trace` records in a real engine: prompts, answers, saved and loaded again.

Two ranks, layer by layer over a real Mooncake store.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.trace.command import with_long_timeouts
from benchmarks.trace.events import chrome_trace
from benchmarks.trace.figures import TracedStep, by_kind
from benchmarks.trace.traced import TraceJob, TraceResult, run
from kvpp_connectors.demo.pool import serving_pool
from kvpp_core.trace import Lane, Span
from tests.cli.chrome_events import check_events
from tests.fork_server import call_apart, forked_workers

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("patient_clients")]

LAYERS, RANKS, PROMPTS, TOKENS, CHUNK, ANSWER = 6, 2, 2, 200, 64, 5
BLOCK_BYTES = 16 * 576 * 4  # of one layer
HELD = TOKENS // 16  # blocks of a prompt that are saved
LOADING = "prefill that loads"


def record(job: TraceJob) -> TraceResult:
    with forked_workers():
        return run(job)


def recorded(
    model: Path, folder: Path, *, broadcast: str, decode: str, layerwise: bool
) -> TraceResult:
    """Prompts that are saved into a pool of its own, and come again from there."""
    with serving_pool(folder, 256 << 20) as pool:
        job = TraceJob(
            model=str(model),
            broadcast=broadcast,
            decode=decode,
            transfer=with_long_timeouts(pool.transfer_config(), layerwise=layerwise),
            prompts=PROMPTS,
            prompt_tokens=TOKENS,
            chunk=CHUNK,
            answer_tokens=ANSWER,
            tensor_parallel_size=RANKS,
            kv_cache_memory_bytes=64 << 20,
            kept_steps=64,
        )
        found: TraceResult = call_apart(record, job)
        return found


@pytest.fixture(scope="module")
def result(
    checkpoint: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> TraceResult:
    folder = tmp_path_factory.mktemp("trace")
    return recorded(
        checkpoint(LAYERS), folder, broadcast="packed", decode="broadcast", layerwise=True
    )


@pytest.fixture(scope="module")
def kinds(result: TraceResult) -> dict[str, list[TracedStep]]:
    return by_kind([rank.recording for rank in result.ranks])


def computed(step: TracedStep, rank: int, layer: int) -> Span:
    (found,) = step.find(rank, Lane.COMPUTE, layer, "layer")
    return found


def test_the_file_is_a_chrome_trace(result: TraceResult) -> None:
    assert [rank.recording.dropped for rank in result.ranks] == [0] * RANKS
    trace = chrome_trace([rank.recording for rank in result.ranks])
    check_events(json.loads(json.dumps(trace)), RANKS)


def test_every_step_is_there(result: TraceResult, kinds: dict[str, list[TracedStep]]) -> None:
    """The first chunk of a prompt has no history; then all of it but the rest comes at once."""
    assert {kind: len(steps) for kind, steps in kinds.items()} == {
        "prefill": PROMPTS * (-(-TOKENS // CHUNK) - 1),
        "decode": 2 * PROMPTS * (ANSWER - 1),
        LOADING: PROMPTS,
    }
    numbers = [[step.number for step in rank.recording.steps] for rank in result.ranks]
    steps = sum(map(len, kinds.values())) + PROMPTS
    assert numbers == [list(range(steps))] * RANKS


def test_waits_are_those_that_the_engine_counted(result: TraceResult) -> None:
    for rank in result.ranks:
        waited = dict.fromkeys(range(LAYERS), 0)
        for step in rank.recording.steps:
            for span in step.spans:
                if span.lane is Lane.WAIT and span.layer is not None:
                    waited[span.layer] += span.end - span.begin
        counted = {layer: s * 1e9 for layer, s in rank.layer_wait_seconds.items()}
        assert counted == pytest.approx(waited, abs=1.5)  # ns
        assert all(waited.values())


def test_a_layer_is_sent_while_the_one_before_is_computed(
    kinds: dict[str, list[TracedStep]],
) -> None:
    for step in [*kinds["prefill"], *kinds["decode"]]:
        for rank in range(RANKS):
            for layer in range(LAYERS - 1):
                begun = step.find(rank, Lane.BROADCAST, layer + 1, "send")[0].begin
                assert begun < computed(step, rank, layer).end
                sent = step.find(rank, Lane.BROADCAST, layer + 1)[-1].end
                assert sent <= computed(step, rank, layer + 1).begin


def test_loaded_then_sent_then_read(kinds: dict[str, list[TracedStep]]) -> None:
    for step in kinds[LOADING]:
        for layer in range(LAYERS):
            owner = step.owner(layer)
            (load,) = step.find(owner, Lane.LOAD, layer)
            assert not step.find(1 - owner, Lane.LOAD, layer)
            assert (load.facts["blocks"], load.facts["failed"]) == (HELD, 0)
            sends = step.find(owner, Lane.BROADCAST, layer, "send")
            assert load.end <= sends[0].begin
            for rank in range(RANKS):
                assert sends[0].begin < computed(step, rank, layer).begin


def test_bytes_are_those_of_the_active_blocks(kinds: dict[str, list[TracedStep]]) -> None:
    for step in kinds["prefill"]:
        blocks = step.whole[0].facts["blocks"]
        assert step.whole[0].facts["tokens"] in (CHUNK, TOKENS % CHUNK)
        for rank in range(RANKS):
            for send in step.find(rank, Lane.BROADCAST, name="send"):
                assert send.facts["blocks"] == blocks
                assert send.facts["bytes"] == int(blocks) * BLOCK_BYTES


def test_every_layer_of_every_block_is_saved_by_its_owner(result: TraceResult) -> None:
    for rank, traced in enumerate(result.ranks):
        saved = dict.fromkeys(range(rank * 3, rank * 3 + 3), 0)
        for step in traced.recording.steps:
            for span in step.spans:
                if span.lane is Lane.SAVE and span.layer is not None:
                    saved[span.layer] += int(span.facts["blocks"])
        assert saved == dict.fromkeys(saved, PROMPTS * HELD)


@pytest.fixture(scope="module")
def at_owner(
    checkpoint: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> TraceResult:
    folder = tmp_path_factory.mktemp("owner")
    return recorded(checkpoint(LAYERS), folder, broadcast="auto", decode="owner", layerwise=False)


def test_decode_at_the_owner_is_recorded_by_layer(at_owner: TraceResult) -> None:
    """Four heads of a query (latent and rotary key) go there, four results (latent) come back."""
    recordings = [rank.recording for rank in at_owner.ranks]
    assert "decode" not in by_kind(recordings)
    steps = by_kind(recordings, Lane.EXCHANGE)["decode"]
    assert len(steps) == 2 * PROMPTS * (ANSWER - 1)
    check_events(json.loads(json.dumps(chrome_trace(recordings))), RANKS)
    for step in steps:
        for rank in range(RANKS):
            spans = step.find(rank, Lane.EXCHANGE)
            assert [(span.layer, span.name) for span in spans] == [
                (layer, name)
                for layer in range(LAYERS)
                for name in ("queries", "attention", "results")
            ]
            assert {span.facts["owner"] for span in spans[: len(spans) // 2]} == {0}
            assert sum(int(s.facts["bytes"]) for s in spans) == LAYERS * 4 * (576 + 512) * 4


@pytest.mark.parametrize("lane", [Lane.SAVE, Lane.LOAD])
def test_whole_blocks_of_a_pool_are_recorded_on_every_owner(
    at_owner: TraceResult, lane: Lane
) -> None:
    for rank in at_owner.ranks:
        found = [s for step in rank.recording.steps for s in step.spans if s.lane is lane]
        assert {span.layer for span in found} == {None}
        assert sum(int(span.facts["blocks"]) for span in found) == PROMPTS * HELD
        payload = PROMPTS * HELD * LAYERS // RANKS * BLOCK_BYTES
        assert payload < sum(int(span.facts["bytes"]) for span in found) < payload * 1.01
        assert sum(int(span.facts["failed"]) for span in found) == 0
