"""Counters of one interval, in the shape that vLLM collects from its workers and logs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

__all__ = ["ConnectorStats"]


@dataclass
class ConnectorStats(KVConnectorStats):
    """Values by name: numbers, lists of samples, and numbers by a further name."""

    @classmethod
    def of(cls, data: dict[str, Any]) -> Self | None:
        """The stats without what is 0, or None where nothing happened."""
        stats = cls(data={name: value for name, value in data.items() if value})
        return stats if stats.data else None

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> Self:
        """Add another interval or worker to this one."""
        for name, value in other.data.items():
            if isinstance(value, list):
                self.data[name] = [*self.data.get(name, ()), *value]
            elif isinstance(value, dict):
                self.data[name] = dict(Counter(self.data.get(name, {})) + Counter(value))
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What one log line says: the numbers."""
        return {name: v for name, v in self.data.items() if isinstance(v, (int, float))}
