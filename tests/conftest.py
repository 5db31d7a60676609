"""Settings that every test process and its children need, before vLLM is imported."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest
from hypothesis import Phase, settings

settings.register_profile("first-failure", phases=(Phase.explicit, Phase.generate))
os.environ.update(
    {
        # One thread a rank, not pinned: two ranks share two cores with whatever else runs.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_CI_ENV": "1",  # no warm-up
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Mooncake's calls, where a master shares the cores: ours would give up after a second.
        "MC_RPC_TIMEOUT_MS": "5000",
        # The engine core in the test's process: steps follow one another as the test asks for
        # them, so that two engines get the same schedule.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
)

COLLECTED = pytest.StashKey[dict[str, frozenset[str]]]()  # the markers of every test, by its id


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what was collected, before -m and -k deselect."""
    config.stash[COLLECTED] = {
        item.nodeid: frozenset(mark.name for mark in item.iter_markers()) for item in items
    }


@pytest.fixture
def caplog(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """pytest's own, which also hears our loggers after some test has had vLLM set up its logging.

    vLLM gives the logger ``vllm`` a level and ends propagation there, for the whole process.
    """
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger=logger.name)
    return caplog


@pytest.fixture(scope="module")
def ports() -> Iterator[Callable[[int], Sequence[int]]]:
    """``ports(n)``: consecutive ports that are free, and a module's until its end."""
    from kvpp_connectors.connector.ports import reserved_ports

    with ExitStack() as stack:
        yield lambda count: stack.enter_context(reserved_ports(count))


@pytest.fixture(scope="module")
def patient_clients() -> Iterator[None]:
    """Engines that share two cores with a mooncake_master: a call may starve for long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_RPC_TIMEOUT_MS", "20000")
        yield
