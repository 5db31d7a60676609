"""The scheduler halves of p2p, pool and multi under random interleavings, on vLLM's own scheduler.

Properties S1, S2, S3, S6 and S9; field reports 2.4, 2.5, 2.6, 2.8, 2.9, 4.1, 4.2, 4.6 and 6.1.
Always the same examples; with SAFETY_STEPS=N, of the engine and for each kind, and SAFETY_SEED=N
there are more and others.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.safety.machine import Requests
from tests.safety.site import Kind, Launch

FEW = 2_000
STEPS = int(os.environ.get("SAFETY_STEPS", "10000"))
SEED = int(os.environ.get("SAFETY_SEED", "0"))
BATCH = settings(
    max_examples=50,
    stateful_step_count=100,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"

KINDS = {
    "pool": Kind(pool=True),
    "pool, between steps": Kind(pool=True, load_async=True),
    "pool, failing": Kind(pool=True, policy="fail"),
    "pool, between steps, failing": Kind(pool=True, load_async=True, policy="fail"),
    "prefill": Kind(PRODUCER),
    "decode": Kind(CONSUMER),
    "decode, failing": Kind(CONSUMER, policy="fail"),
    "prefill and pool": Kind(PRODUCER, pool=True),
    "pool and prefill, between steps": Kind(PRODUCER, pool=True, pool_first=True, load_async=True),
    "decode and pool": Kind(CONSUMER, pool=True),
    "pool and decode, between steps": Kind(CONSUMER, pool=True, pool_first=True, load_async=True),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_first_interleavings_end_well(name: str, mla_model: Path) -> None:
    """Blocks, bytes, answers and accounts, after every step and in the end."""
    _run(name, mla_model, FEW)


@pytest.mark.grid
@pytest.mark.timeout(900 + STEPS / 50)
@pytest.mark.parametrize("name", KINDS)
def test_every_interleaving_ends_well(name: str, mla_model: Path) -> None:
    """More of them."""
    _run(name, mla_model, STEPS)


def _run(name: str, mla_model: Path, steps: int) -> None:
    machine: Any = type("Machine", (Requests,), {"launch": Launch(mla_model, KINDS[name])})
    for batch in count(SEED):  # hypothesis remembers all examples of a batch
        run_state_machine_as_test(seed(f"{name} {batch}")(machine), settings=BATCH)
        if machine.steps_done >= steps:
            break
    print(f"{name}: {machine.steps_done:,} steps, seeds {SEED} to {batch}")
