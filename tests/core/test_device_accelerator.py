"""The accelerator's streams on a stream of torch that does nothing: what stands in a profile.

Their order is tested on torch-npu (tests/ascend_sim).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kvpp_core.device.accelerator import AcceleratorStream

Operation = Callable[[AcceleratorStream], None]


class NoStream:
    """As much of torch.Stream as is entered."""

    def __enter__(self) -> None:
        """Nothing to make current."""

    def __exit__(self, *error: object) -> None:
        """Nothing to put back."""


class Ended:
    """A collective that has ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> None:
        """Nothing is under way."""


def loaded() -> Future[None]:
    """A load that has ended."""
    fence: Future[None] = Future()
    fence.set_result(None)
    return fence


def pack() -> None:
    """One operation of torch."""
    torch.zeros(1).add_(1)


OPERATIONS: dict[str, Operation] = {
    "packing": lambda stream: stream.run(pack, "packing"),
    "the broadcast": lambda stream: stream.collective(Ended, "the broadcast"),
    "the load": lambda stream: stream.wait_fence(loaded(), 1.0, "the load"),
}


def test_operations_stand_by_name_in_a_profile_with_what_they_call() -> None:
    made: Any = NoStream()
    stream = AcceleratorStream(made, 1.0)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for operation in OPERATIONS.values():
            operation(stream)
    events = profiled.events()
    assert events is not None
    ours = [event for event in events if event.name.startswith("KVPP: ")]
    assert [event.name for event in ours] == [f"KVPP: {what}" for what in OPERATIONS]
    assert "aten::add_" in {child.name for child in ours[0].cpu_children}


def test_without_a_profiler_nothing_is_recorded(monkeypatch: Any) -> None:
    """A range costs microseconds even then, and a step has hundreds of operations."""
    made: Any = NoStream()
    entered: list[str] = []
    monkeypatch.setattr("kvpp_core.device.accelerator.record_function", entered.append)
    for operation in OPERATIONS.values():
        operation(AcceleratorStream(made, 1.0))
    assert entered == []
