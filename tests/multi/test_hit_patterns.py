"""What both children of MultiConnector know of one request, and how it ends, case by case.

On vLLM's own scheduler, with workers that move no bytes but check what is read. Hits in blocks, in
the order of the children: (0, 0), (8, 0), (0, 8), (8, 4), (4, 8), and "ask me later". The P/D child
has all of a prompt or nothing of it, so that 4 is always the pool's. Field reports 2.4, 2.9.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.launches import write_mla
from tests.safety.site import Kind, Launch, Site
from tests.safety.workers import BLOCK, Ending

ALL = Ending(good=frozenset(range(64)))
NONE = Ending()
PROMPT = [*range(8 * BLOCK), 7, 7, 7]
TOKENS = 20
SLOW = 5  # steps
SAVE_ENDS = {"good": ALL, "bad": Ending(bad=frozenset(range(64)))}

Launches = dict[tuple[str, bool], Launch]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """By role of the P/D child, and whether the pool comes first."""
    model: Path = write_mla(tmp_path_factory.mktemp("multi") / "model")
    return {
        (role, first): Launch(model, Kind(role, pool=True, pool_first=first, load_async=True))
        for role in ("kv_consumer", "kv_producer")
        for first in (False, True)
    }


@pytest.fixture(params=[False, True], ids=["P/D first", "pool first"])
def pool_first(request: pytest.FixtureRequest) -> bool:
    """The order of the children."""
    return bool(request.param)


@pytest.fixture
def decode(launches: Launches, pool_first: bool) -> Iterator[Site]:
    """An engine that pulls, or loads from the pool."""
    yield from running(launches["kv_consumer", pool_first])


@pytest.fixture
def prefill(launches: Launches, pool_first: bool) -> Iterator[Site]:
    """An engine that loads from the pool, saves, and offers."""
    yield from running(launches["kv_producer", pool_first])


def running(launch: Launch) -> Iterator[Site]:
    """An engine with room for two requests."""
    site = Site(launch, 30)
    yield site
    site.close()


later = pytest.mark.parametrize("later", [0, 2], ids=["at once", "ask me later"])


@later
@pytest.mark.parametrize("fate", ["well", "failing", "aborting", "slow"])
@pytest.mark.parametrize("pooled", [0, 4, 8])
@pytest.mark.parametrize("offered", [False, True], ids=["no offer", "offer"])
def test_one_child_loads(
    decode: Site, pool_first: bool, offered: bool, pooled: int, fate: str, later: int
) -> None:
    """The first that has something, and reports once. The pool stands in for a failed pull."""
    decode.save(PROMPT, pooled)
    decode.lookup.later = later
    decode.arrive("r", PROMPT, TOKENS, remote=offered)
    for _ in range(later):
        decode.step(NONE)
        assert decode.workers.loads == [] and decode.free_blocks == decode.all_blocks
    decode.step(NONE)
    children = [("pull", offered), ("load", pooled > 0)]
    found = [(what, "r") for what, has in (children[::-1] if pool_first else children) if has]
    assert decode.workers.loads == found[:1]
    if found:
        end_load(decode, fate)
    decode.drain()
    loads = found if fate == "failing" and ("pull", "r") in found[:1] else found[:1]
    assert decode.workers.loads == loads and decode.workers.reports["r"] == len(loads)
    assert decode.freed["r"] == 1
    assert decode.finished["r"] == ("abort" if found and fate == "aborting" else "length")


def end_load(site: Site, fate: str) -> None:
    """The one transfer that is under way."""
    assert site.workers.under_way == 1 and site.free_blocks < site.all_blocks
    if fate == "aborting":
        site.abort("r")
        site.step(NONE)
    if fate == "slow":
        site.arrive("other", [5] * BLOCK, 2, remote=False)
        for _ in range(SLOW):
            site.step(NONE)
        assert "other" in site.finished and not site.answers["r"]
    site.step(Ending(bad=frozenset({0})) if fate == "failing" else ALL)


@later
@pytest.mark.parametrize("loads", ["well", "failing", "slow"])
@pytest.mark.parametrize("lease", ["read", "released", "expired"])
@pytest.mark.parametrize("save", ["good", "bad"])
@pytest.mark.parametrize("lease_first", [False, True], ids=["save ends first", "lease ends first"])
@pytest.mark.parametrize("pooled", [0, 4, 8])
def test_blocks_stay_until_both_children_are_done(
    prefill: Site, pooled: int, lease_first: bool, save: str, lease: str, loads: str, later: int
) -> None:
    """Decode may read them, and a save does; whoever ends last frees them."""
    prefill.save(PROMPT, pooled)
    prefill.lookup.later = later
    prefill.arrive("r", PROMPT, 1, remote=True)
    for _ in range(later + 1):
        prefill.step(NONE)
    assert prefill.workers.loads == [("load", "r")] * (pooled > 0)
    if pooled:
        end_load(prefill, loads)
    while not prefill.offers:
        prefill.step(NONE)
    saving = prefill.workers.under_way
    assert saving or (pooled == 8 and loads != "failing")
    endings = [lambda: prefill.lease("r", lease), lambda: prefill.step(SAVE_ENDS[save])]
    for end in endings if lease_first else reversed(endings):
        assert prefill.free_blocks < prefill.all_blocks
        end()
        if saving:
            assert (prefill.freed["r"] == 0) is not (prefill.workers.under_way or prefill.offers)
    prefill.step(ALL)
    assert prefill.free_blocks == prefill.all_blocks and prefill.freed["r"] == 1
    prefill.drain()
    assert prefill.workers.reports["r"] == (pooled > 0)


@pytest.mark.parametrize("pooled", [0, 4, 8])
@pytest.mark.parametrize("steps", range(1, 6))
def test_a_client_that_leaves_prefill_gets_nothing_and_holds_nothing(
    prefill: Site, pooled: int, steps: int
) -> None:
    """While it waits, loads, computes, or saves."""
    prefill.save(PROMPT, pooled)
    prefill.arrive("r", PROMPT, 1, remote=True)
    for _ in range(steps):
        prefill.step(NONE if steps % 2 else ALL)
    if "r" not in prefill.finished:
        prefill.abort("r")
        prefill.step(NONE)
        assert not prefill.offers
    prefill.drain()
    assert prefill.freed["r"] == 1
