"""Each ordering on an NPU, a change that takes it away, and the test that must then fail.

`make test-ascend-sim ARGS=mutations` makes the changes one by one in a copy of the project.
"""

from __future__ import annotations

import sys

from tests.safety.__main__ import main
from tests.safety.mutations import S04, S05, S07, S10, Mutation

PIPELINE = "kvpp_core/pipeline.py"
ACCELERATOR = "kvpp_core/device/accelerator.py"
LATE_WRITE = f"{S07}::test_a_broadcast_covers_the_owners_earlier_late_write[npu-full-written]"
LATE_READ = f"{S10}::test_a_slot_is_not_refilled_before_its_late_reader_is_done[npu-full]"
LATE_TRANSFER = (
    f"{S05}::test_a_layer_is_not_read_before_its_late_broadcast_has_ended[npu-full-main]"
)
LATE_LOAD = f"{S04}::test_a_layer_is_broadcast_after_its_late_load[npu-0]"

WAIT = "        transfer.wait(self._device.compute.record(), "
OWNED = "self._layout.placement.owners[ordinal] == self._group.rank"

MUTATIONS = [
    Mutation(
        "S7",
        "the ready event: an owner sends a layer before it has been written",
        PIPELINE,
        WAIT,
        f"        if not {OWNED}:\n    {WAIT}",
        LATE_WRITE,
    ),
    Mutation(
        "S10",
        "the slot-reuse event: a slot is refilled under its reader",
        PIPELINE,
        WAIT,
        f"        if {OWNED}:\n    {WAIT}",
        LATE_READ,
    ),
    Mutation(
        "S5",
        "the completion event: a layer is read before it has come",
        PIPELINE,
        "        self._device.compute.wait(in_flight.done, "
        'f"the broadcast of layer {self._layer(ordinal)}")\n',
        "",
        LATE_TRANSFER,
    ),
    Mutation(
        "S5",
        "the transfer stream does not wait for HCCL's stream",
        ACCELERATOR,
        "            launch().wait()",
        "            launch()",
        LATE_TRANSFER,
    ),
    Mutation(
        "S7",
        "events are recorded, and no stream waits for them",
        ACCELERATOR,
        "        self._stream.wait_event(event.event)\n",
        "",
        LATE_WRITE,
    ),
    Mutation(
        "S4",
        "the launch does not wait for a load",
        ACCELERATOR,
        "            await_fence(fence, timeout)\n",
        "            pass\n",
        LATE_LOAD,
    ),
    Mutation(
        "S7",
        "the block ids of a step are copied by the host, when their turn has come",
        PIPELINE,
        ', pin_memory=place.type != "cpu"',
        "",
        LATE_WRITE,
    ),
]

if __name__ == "__main__":
    sys.exit(main(MUTATIONS))
