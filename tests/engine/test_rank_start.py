"""A worker's KVPP as it starts, without an engine: what it has opened when a later part fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
import torch

from kvpp_connectors.engine import groups, rank
from kvpp_connectors.engine.adapter import Adapter032
from kvpp_connectors.launch.options import KvppOptions
from kvpp_core.errors import KvppError, TransferTimeout
from kvpp_core.policy import CostModel

COST = CostModel(latency=1e-3, per_range=1e-3, bandwidth=1e9, pack_bandwidth=1e9)


class Group:
    """A group of one rank that knows whether it was closed."""

    closed = False

    def close(self) -> None:
        """As `KvppGroup.close`."""
        self.closed = True


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, ports: Callable[[int], Sequence[int]]) -> Group:
    """The group that a worker makes."""
    made = Group()
    monkeypatch.setattr(groups, "create", lambda *args: made)
    monkeypatch.setattr(rank, "own_host", lambda: "127.0.0.1")
    return made


def start(port: int) -> rank.KvppRank:
    """KVPP of rank 0 on CPU, with its counters at ``port``."""
    parallel = SimpleNamespace(
        tensor_parallel_size=1, prefill_context_parallel_size=1, world_size=1, data_parallel_rank=0
    )
    worker = SimpleNamespace(parallel_config=parallel, device=torch.device("cpu"), rank=0)
    return rank.KvppRank(worker, Adapter032(worker), KvppOptions(metrics_port=port))


def counters(port: int) -> bytes:
    """The page at ``port``."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        page: bytes = answer.read()
        return page


def test_what_was_opened_is_closed_when_a_later_part_does_not_start(
    group: Group, monkeypatch: pytest.MonkeyPatch, ports: Callable[[int], Sequence[int]]
) -> None:
    """The group, and the port of the counters; another start takes both again."""
    (port,) = ports(1)

    def late(*args: Any) -> CostModel:
        raise TransferTimeout("a rank is gone")

    monkeypatch.setattr(rank, "measure_costs", late)
    with pytest.raises(TransferTimeout):
        start(port)
    assert group.closed
    group.closed = False
    monkeypatch.setattr(rank, "measure_costs", lambda *args: COST)
    kvpp = start(port)
    with pytest.raises(KvppError, match="metrics_port"):
        start(port)  # the port is taken
    assert group.closed
    kvpp.close()


def test_counters_are_served_while_the_worker_still_starts(
    group: Group, monkeypatch: pytest.MonkeyPatch, ports: Callable[[int], Sequence[int]]
) -> None:
    """Prometheus may ask before the first step, while broadcasts are measured."""
    (port,) = ports(1)
    pages: list[bytes] = []

    def measure(*args: Any) -> CostModel:
        pages.append(counters(port))
        return COST

    monkeypatch.setattr(rank, "measure_costs", measure)
    start(port).close()
    assert b'kvpp_steps_total{rank="0"} 0.0' in pages[0]
