"""Counters of a worker's pulls, in the shape that vLLM collects, logs and exports."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvpp_connectors.p2p.fetcher import PullResult

__all__ = ["P2pStats"]


class P2pStats:
    """Pulls of one interval: how many, bytes from where, seconds, failures by reason."""

    def __init__(self) -> None:
        self.pulls = 0
        self.bytes = 0
        self.shared_bytes = 0
        self.shares_not_taken = 0
        self.seconds: list[float] = []
        self.failures: Counter[str] = Counter()

    def record(self, result: PullResult) -> None:
        """Count one pull that has ended."""
        self.shares_not_taken += result.shares_not_taken
        if result.problem is not None:
            self.failures[result.reason] += 1
            return
        self.pulls += 1
        self.bytes += result.bytes
        self.shared_bytes += result.shared_bytes
        self.seconds.append(result.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; empty if nothing happened."""
        if not self.pulls and not self.failures:
            return {}
        return {
            "pulls": self.pulls,
            "pull_bytes": self.bytes,
            "pull_shared_bytes": self.shared_bytes,
            "pull_shares_not_taken": self.shares_not_taken,
            "pull_seconds": self.seconds,
            "pull_failures": dict(self.failures),
        }
