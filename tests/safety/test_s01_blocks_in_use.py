"""S1: no block is handed out while a read or a write on it is under way, on either side.

In the scheduler: a request is over for its client, other requests want every block, and its save,
load, pull or offer has not ended. At decode: a pull fails, and reads that were submitted before
still write; real workers, ports and Transfer Engines. Injected: transfers that are held, refused,
failed and given up. Field reports 2.1, 2.2, 2.3, 2.5, 6.1.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.p2p.conftest import Machine
from tests.p2p.pull_rig import ReadFault, held_reads, rig
from tests.p2p.sides import PATIENCE, eventually
from tests.safety.site import Kind, Launch, Site
from tests.safety.workers import BLOCK, Ending

USES = {
    "a save": Kind(pool=True),
    "a load": Kind(pool=True, load_async=True),
    "a pull": Kind("kv_consumer"),
    "an offer": Kind("kv_producer"),
    "a save beside an offer": Kind("kv_producer", pool=True),
    "a pull beside a pool": Kind("kv_consumer", pool=True, pool_first=True, load_async=True),
}
PROMPT = [*range(4 * BLOCK), 7, 7]
NONE = Ending(still_read=True)  # no transfer ends, whatever is asked of it
ENDS = {"well": Ending(good=frozenset(range(64))), "badly": Ending(bad=frozenset(range(64)))}


@pytest.fixture(scope="module", params=USES)
def launch(request: pytest.FixtureRequest, mla_model: Path) -> Launch:
    """An engine in which a request's blocks are used so."""
    return Launch(mla_model, USES[request.param])


@pytest.fixture
def site(launch: Launch) -> Iterator[Site]:
    """With room for three requests."""
    site = Site(launch, 17)
    yield site
    site.close()


def bring_into_use(site: Site) -> list[int]:
    """The blocks of a request that is over for its client, and that something still uses."""
    kind = site.kind
    if kind.load_async and kind.pd is None:
        site.save(PROMPT, 4)
    site.arrive("r", PROMPT, 1, remote=True)
    site.step(NONE)
    blocks = site.blocks_of("r")
    if site.workers.under_way:  # a load or a pull
        site.abort("r")
    site.step(NONE)
    assert "r" in site.finished and (site.workers.under_way or site.offers)
    return blocks[:4]


@pytest.mark.parametrize("how", ENDS)
def test_blocks_in_use_are_nobody_elses_until_their_last_user_ends(site: Site, how: str) -> None:
    """The others wait, or do with what is free."""
    used = set(bring_into_use(site))
    assert len(used) == 4
    for number in range(5):
        site.arrive(f"other{number}", [50 + number] * 3 * BLOCK, 20, remote=False)
    for _ in range(40):
        site.step(NONE)
        for name in site.live:
            assert used.isdisjoint(site.blocks_of(name)), f"{name} was given blocks in use"
        assert site.free_blocks <= site.all_blocks - len(used)
        assert site.freed["r"] == 0
    for name in list(site.offers):
        site.lease(name, "read")
    for _ in range(2):
        site.step(ENDS[how])
    assert site.freed["r"] == 1
    site.drain()


@pytest.mark.parametrize("fault", ["refused", "failed", "given up"])
@pytest.mark.parametrize("held", [1, 3])
def test_a_failed_pull_ends_after_the_last_read_that_can_still_write(
    machine: Machine, held: int, fault: ReadFault
) -> None:
    """2.1: its blocks are given to others then, and not a byte of them changes any more."""
    bound = 0.1 if fault == "given up" else PATIENCE
    window = held + (fault != "given up")
    with held_reads(machine, held, fault, window=window, pull_timeout=bound) as (both, reads):
        both.pull_worker.submit(both.pull("a"))
        reads.let_go_one_by_one(lambda: both.pull_worker.take_results() == [])
        assert both.result().reason == "read"
        both.assert_blocks_may_be_given_away()


def test_closing_ends_what_runs_and_what_waits(machine: Machine) -> None:
    """S1: nothing writes to local memory afterwards."""
    with rig(machine, closed_at=2, threads=1) as both:
        for name in "abc":
            both.pull_worker.submit(both.pull(name))
        assert both.gate.reached.wait(PATIENCE)
        closing = threading.Thread(target=both.pull_worker.close, daemon=True)
        closing.start()
        eventually(lambda: both.pull_worker._cancelled >= {"a", "b", "c"})
        both.gate.open()
        closing.join(PATIENCE)
        assert not closing.is_alive()
        assert [result.reason for result in both.pull_worker.take_results()] == ["cancelled"]
        both.pull_worker._running.clear()  # what had not begun is not reported: the engine ends
