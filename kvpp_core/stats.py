"""Counters of the pipeline: steps, broadcasts, bytes, and the forward's waits for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvpp_core.policy import Mode

__all__ = ["PipelineStats"]


@dataclass(slots=True)
class PipelineStats:
    """Counters since start. Bytes are payload: the same number on every rank of a group."""

    steps: int = 0
    steps_with_history: int = 0
    broadcasts: Counter[Mode] = field(default_factory=Counter)
    bytes: Counter[Mode] = field(default_factory=Counter)
    active_history_bytes: int = 0  # active blocks of every target bundle: what steps needed
    full_bytes: int = 0  # what the specification's complete bundles would have moved
    wait_ns: int = 0  # host time that a forward waited for its layers' bytes
    layer_wait_ns: Counter[int] = field(default_factory=Counter)  # the same by layer
    load_failures: int = 0
    aborted_steps: int = 0

    @property
    def wait_seconds(self) -> float:
        """Exposed waits: time that no computation hid. On an accelerator only the host's."""
        return self.wait_ns / 1e9

    def waited(self, layer: int, nanoseconds: int) -> None:
        """Count a forward's wait for a layer."""
        self.wait_ns += nanoseconds
        self.layer_wait_ns[layer] += nanoseconds

    def snapshot(self) -> dict[str, int | float | dict[str, int] | dict[int, float]]:
        """The counters as plain data, for logs, metrics and the demo."""
        return {
            "steps": self.steps,
            "steps_with_history": self.steps_with_history,
            "broadcasts": {mode.value: count for mode, count in self.broadcasts.items()},
            "bytes": {mode.value: count for mode, count in self.bytes.items()},
            "bytes_total": sum(self.bytes.values()),
            "active_history_bytes": self.active_history_bytes,
            "full_bytes": self.full_bytes,
            "wait_seconds": self.wait_seconds,
            "layer_wait_seconds": {layer: ns / 1e9 for layer, ns in self.layer_wait_ns.items()},
            "load_failures": self.load_failures,
            "aborted_steps": self.aborted_steps,
        }
