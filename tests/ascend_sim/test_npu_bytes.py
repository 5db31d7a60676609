"""Every byte of every rank's memory after every acquire, on the simulated NPU.

In every policy, with gates closed nowhere; and while each operation of each stream takes a random
time, with torch-npu's own launch queue, as it runs on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpp_core.policy import BroadcastPolicy
from tests.core.byte_check import Seen
from tests.core.gloo_world import GlooWorld
from tests.core.test_broadcast_bytes import run_sliced, run_steps


@pytest.fixture(scope="module")
def late_world() -> Iterator[GlooWorld]:
    """Two ranks with streams that are late at random."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_SIM_JITTER_US", "2000")
        patch.setenv("ASCEND_SIM_DELAY_US", "broadcast=1000")
        patch.setenv("TASK_QUEUE_ENABLE", "1")
        world = GlooWorld(2)
        yield world
        world.close()


@pytest.mark.parametrize("policy", list(BroadcastPolicy))
def test_every_byte_is_the_owners(world2: GlooWorld, policy: BroadcastPolicy) -> None:
    seen = world2.run(run_steps, policy, 5, poison_scratch=True, kind="npu")
    assert seen == [Seen([], [])] * 2


@pytest.mark.parametrize("policy", list(BroadcastPolicy))
def test_every_byte_is_the_owners_whenever_streams_run(
    late_world: GlooWorld, policy: BroadcastPolicy
) -> None:
    assert late_world.run(run_steps, policy, 5, kind="npu") == [Seen([], [])] * 2


@pytest.mark.parametrize("staging_blocks", [1.0, 20.0])
def test_slices_of_packed_blocks_do_not_mix(late_world: GlooWorld, staging_blocks: float) -> None:
    assert late_world.run(run_sliced, "npu", staging_blocks) == [Seen([], [])] * 2
