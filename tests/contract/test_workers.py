"""The worker classes, and what the launch gate, which stands below them, knows of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvpp_connectors.engine.workers import KVPP_WORKERS, KVPP_WORKERS_023, PROFILE_WORKER
from kvpp_connectors.launch.facts import launch_from_vllm
from kvpp_connectors.launch.platforms import KVPP_DEVICES, KVPP_DEVICES_023
from kvpp_connectors.launch.rules import check
from tests.contract.launches import engine_config


def test_the_gate_serves_the_devices_that_have_a_worker() -> None:
    assert tuple(KVPP_WORKERS) == KVPP_DEVICES
    assert tuple(KVPP_WORKERS_023) == KVPP_DEVICES_023


@pytest.mark.parametrize(
    ("worker_cls", "runs_kvpp"),
    [
        *((name, True) for name in (*KVPP_WORKERS.values(), *KVPP_WORKERS_023.values())),
        (PROFILE_WORKER, False),
        ("auto", False),
    ],
)
def test_a_worker_that_runs_kvpp_needs_the_switch(
    mla_model: Path, worker_cls: str, runs_kvpp: bool
) -> None:
    launch = launch_from_vllm(engine_config(mla_model, {}))
    problems = check(dataclasses.replace(launch, worker_cls=worker_cls))
    assert [problem.rule for problem in problems] == ["worker-needs-the-switch"] * runs_kvpp
