"""KVPP on a sparse model: bundles of main and indexer caches, of unequal sizes, over two ranks.

Layers 2 and 4 have no indexer of their own. The answers equal those without KVPP to the last bit,
and do not any more once a byte of an indexer cache is wrong or is not broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine import tiny_models
from tests.engine.harness import (
    Engine,
    Request,
    Script,
    Trace,
    kvpp_off,
    kvpp_on,
    random_tokens,
    start_engine,
)
from tests.engine.test_equality import SCRIPTS

pytestmark = pytest.mark.engine

INDEXER = ".indexer.k_cache"
CHOSEN = (
    "prompts longer than the token budget",
    "prefix hits",
    "requests with and without history in one step",
    "preemption",
    "abort in mid-flight",
)
LONG = Script((Request(random_tokens(10, 120), max_tokens=40),))
PRIORITIES = Script(
    tuple(
        Request(random_tokens(90 + n, 64), max_tokens=60, arrives=2 * n, priority=-n)
        for n in range(10)
    )
)


@dataclass(frozen=True)
class Traces:
    """What each engine answered, and the runs with a fault."""

    off: dict[str, Trace]
    on: dict[str, Trace]
    flipped: Trace
    without_indexer: Trace
    layout: list[dict[str, Any]]
    free_blocks: tuple[int, int]  # before and after all scripts


def run_all(engine: Engine) -> dict[str, Trace]:
    """Every script, each from an empty prefix cache."""
    traces = {}
    for name, script in {
        **{name: SCRIPTS[name] for name in CHOSEN},
        "long": LONG,
        "priorities": PRIORITIES,
    }.items():
        engine.reset_prefix_cache()
        traces[name] = engine.run(script)
    engine.reset_prefix_cache()
    return traces


@pytest.fixture(scope="module", params=["plain", "c8 and mtp"])
def traces(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Traces]:
    """Float32 caches; then C8 caches with a draft layer of its own, drafting two tokens."""
    model = tiny_models.SHARED
    options: dict[str, Any] = {"scheduling_policy": "priority", "blocks": 60}
    if request.param == "c8 and mtp":
        model = replace(model, drafts=1)
        options["kv_cache_dtype"] = "fp8_ds_mla"
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 2}
    folder: Path = tiny_models.write(tmp_path_factory.mktemp("sparse"), model)
    with start_engine(folder, kvpp_off(), **options) as engine:
        off = run_all(engine)
    with start_engine(
        folder, kvpp_on(broadcast="active", scratch="fitted", decode="auto"), **options
    ) as engine:
        before = engine.free_blocks
        on = run_all(engine)
        after = engine.free_blocks
        layout = engine.call("kvpp_layout")
        flipped = engine.run(
            LONG, {12: lambda e: e.call("fault_flip_bit", e.first_block(), INDEXER, 6)}
        )
        engine.reset_prefix_cache()
        engine.call("fault_stop_component", INDEXER)
        without = engine.run(LONG)
    yield Traces(off, on, flipped, without, layout, (before, after))


@pytest.mark.parametrize("name", [*CHOSEN, "long", "priorities"])
def test_answers_are_equal_to_the_last_bit(traces: Traces, name: str) -> None:
    """Same schedule, tokens and logprobs."""
    assert traces.off[name] == traces.on[name]


def test_the_scripts_preempt(traces: Traces) -> None:
    """The pool is too small for some of them; a late request of high priority pushes others out."""
    assert traces.on["preemption"].preemptions > 0
    assert traces.on["priorities"].preemptions > 0


def test_no_block_is_lost(traces: Traces) -> None:
    """As many free blocks after all scripts as before."""
    assert traces.free_blocks[0] == traces.free_blocks[1]


def test_bundles_have_one_owner_and_drafts_none(traces: Traces) -> None:
    """Six target layers, three a rank; an MTP layer is no target layer."""
    assert [rank["owned_layers"] for rank in traces.layout] == [[0, 1, 2], [3, 4, 5]]
    assert all(rank["draft_layers"] in ([], [6]) for rank in traces.layout)


def test_one_wrong_indexer_byte_shows(traces: Traces) -> None:
    """One byte of one key in a history block: other rows are chosen."""
    clean, broken = traces.on["long"].answers[0], traces.flipped.answers[0]
    assert clean.logprobs != broken.logprobs


def test_missing_broadcasts_of_the_indexer_show(traces: Traces) -> None:
    """Main caches alone are not enough."""
    assert traces.on["long"].answers[0].tokens != traces.without_indexer.answers[0].tokens
