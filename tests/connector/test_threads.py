"""Threads beside the model: they use the worker's device, and none ends in silence."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpp_connectors
from kvpp_connectors.connector.threads import make_executor, start_thread
from kvpp_connectors.pool.messages import PoolStep
from tests.core.rank_memory import RankMemory, uneven_model
from tests.pool.master import wait_until
from tests.pool.stores import MemCacheStandInStore
from tests.safety.faulty_store import FaultyStore
from tests.safety.layer_pool import NAMESPACE, job_of, life_of
from tests.safety.pool_worker import pool_worker

SECOND = torch.device("cuda", 1)
PATIENCE = 20.0


class Accelerator:
    """What each thread has asked of the accelerator, in order, by the thread's name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, list[object]] = {}
        patch.setattr(torch.accelerator, "set_device_index", self.note)
        patch.setattr(torch.accelerator, "set_stream", self.note)
        patch.setattr(torch, "Stream", lambda device: f"a stream of {device}")

    def note(self, what: object) -> None:
        self.asked.setdefault(threading.current_thread().name, []).append(what)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    return Accelerator(monkeypatch)


def in_an_executor(work: Callable[[], None], device: torch.device | None) -> None:
    with make_executor("beside", 1, device=device) as executor:
        executor.submit(work).result(PATIENCE)


def in_a_thread(work: Callable[[], None], device: torch.device | None) -> None:
    start_thread("beside_0", work, "nothing is lost", device=device).join(PATIENCE)


WAYS = pytest.mark.parametrize("run", [in_an_executor, in_a_thread])


@WAYS
def test_a_thread_uses_the_workers_device_and_a_stream_of_its_own_before_anything_else(
    accelerator: Accelerator, run: Callable[..., None]
) -> None:
    """An event that a thread records on device 0 says nothing about the work of device 1."""
    run(lambda: accelerator.note("its work"), SECOND)
    assert accelerator.asked == {"beside_0": [1, "a stream of cuda:1", "its work"]}


@WAYS
@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_without_device_memory_a_thread_asks_nothing_of_an_accelerator(
    accelerator: Accelerator, run: Callable[..., None], device: torch.device | None
) -> None:
    run(lambda: accelerator.note("its work"), device)
    assert accelerator.asked == {"beside_0": ["its work"]}


@WAYS
def test_a_thread_computes_without_helpers(run: Callable[..., None]) -> None:
    found: list[int] = []
    run(lambda: found.append(torch.get_num_threads()), None)
    assert found == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_with_an_error_says_what_does_not_work_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise LookupError("no such thing")

    start_thread("kvpp test", fail, "leases run out; restart the engine").join(PATIENCE)
    [line] = [record for record in caplog.records if record.exc_info is not None]
    expected = "thread kvpp test ended with an error: leases run out; restart the engine"
    assert line.getMessage() == expected


@pytest.mark.parametrize("layerwise", [False, True])
def test_every_thread_of_a_pool_uses_the_workers_device(
    tmp_path: Path, accelerator: Accelerator, layerwise: bool
) -> None:
    memory = RankMemory(uneven_model(3).placement(1, 0), 6)
    opened = MemCacheStandInStore(tmp_path)
    options: dict[str, Any] = {"use_layerwise": layerwise}
    with pool_worker(FaultyStore(opened.backend), memory, False, SECOND, **options) as worker:
        worker.start(PoolStep(namespace=NAMESPACE, saves=[job_of([1])], ended=[life_of()]))
        wait_until(partial(_has_saved, worker), PATIENCE, "saved")
        worker.start(PoolStep(namespace=NAMESPACE, loads=[job_of([1])]))
        assert worker.take_invalid_blocks() == set()
    opened.close()
    load = "kvpp-pool-layers_0" if layerwise else "kvpp-pool-load_0"
    assert accelerator.asked.keys() == {"kvpp-pool-connect", "kvpp-pool-save_0", load}
    for asked in accelerator.asked.values():
        assert asked == [1, "a stream of cuda:1"]


def _has_saved(worker: Any) -> bool:
    return bool(worker.finished()[0] == {"r"})


def test_no_other_module_of_the_connectors_makes_threads() -> None:
    """One that is made elsewhere is on device 0, and its end is seen by nobody."""
    package = Path(kvpp_connectors.__file__).parent
    home = package / "connector/threads.py"
    makers: list[str] = []
    for room in ("connector", "engine", "multi", "p2p", "pool"):
        for path in (package / room).rglob("*.py"):
            names = {
                node.attr if isinstance(node, ast.Attribute) else node.id
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, (ast.Attribute, ast.Name))
            }
            if path != home and names & {"Thread", "ThreadPoolExecutor", "Timer"}:
                makers.append(str(path.relative_to(package)))
    assert makers == []
