"""S4 in the scheduler: what a failed load leaves in a block is nobody's KV.

The request that loaded it would compute it in its next step, and is gone before. Field report 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.launches import write_mla
from tests.safety.site import Kind, Launch, Site
from tests.safety.workers import BLOCK, Ending

PROMPT = [*range(4 * BLOCK), 7, 7]
FAILS, NONE = Ending(loads_fail=True), Ending()


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """A pool whose loads end within their step."""
    return Launch(write_mla(tmp_path_factory.mktemp("s04") / "model"), Kind(pool=True))


@pytest.fixture
def site(launch: Launch) -> Iterator[Site]:
    """An engine that finds all of PROMPT in the pool."""
    site = Site(launch, 40)
    site.save(PROMPT, 4)
    yield site
    site.close()


def ends_right(site: Site, *names: str) -> None:
    """`Site` compares each answer with the right one."""
    site.drain()
    assert {site.finished[name] for name in names} == {"length"}


def test_a_failed_load_is_computed(site: Site) -> None:
    site.arrive("a", PROMPT, 4, remote=False)
    site.step(FAILS)
    ends_right(site, "a")


@pytest.mark.parametrize("tail", [0, 40], ids=["as long", "longer"])
def test_blocks_of_a_request_that_is_aborted_before_it_computes_them(site: Site, tail: int) -> None:
    site.arrive("a", PROMPT, 4, remote=False)
    site.step(FAILS)
    site.abort("a")
    site.arrive("b", [*PROMPT, *[9] * tail], 4, remote=False)
    ends_right(site, "b")


def test_what_was_computed_after_them_is_not_used_either(site: Site) -> None:
    """Whole blocks that the same step filled from them are cached as well."""
    longer = [*PROMPT, *[9] * 40]
    site.arrive("a", longer, 4, remote=False)
    site.step(FAILS)
    site.abort("a")
    site.arrive("b", longer, 4, remote=False)
    ends_right(site, "b")


def test_a_request_that_shares_them_in_the_same_step(site: Site) -> None:
    """vLLM has the first of the two compute them for both."""
    for name in ("a", "b"):
        site.arrive(name, PROMPT, 4, remote=False)
    site.step(FAILS)
    site.abort("a")
    ends_right(site, "b")
