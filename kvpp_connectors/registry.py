"""What one process knows of itself, for those of its parts that vLLM makes apart from one another.

vLLM creates the worker and the connector independently; the worker puts down here what it laid out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvpp_core.device.base import Fence
from kvpp_core.layout import RankLayout
from kvpp_core.manifest import Manifest

__all__ = ["KvppFacts", "LayerLoads", "layer_loads", "offer_layer_loads", "publish", "published"]


@dataclass(frozen=True, slots=True)
class KvppFacts:
    """What this process's worker laid out, and what its group agreed on; None without KVPP."""

    layout: RankLayout | None = None
    manifest: Manifest | None = None


class LayerLoads(Protocol):
    """A connector that loads layers inside a step. Called from the thread that runs the model."""

    def take_fences(self) -> Mapping[int, Fence] | None:
        """This step's loads of this rank, by layer; None where no rank of the group loads."""

    def reached(self, layer: int) -> None:
        """The model is about to touch a layer's cache for the first time in this step."""

    def failed(self, layer: int) -> None:
        """A layer was not loaded in time by its owner: what depends on it is not valid."""


class _Process:
    """What the parts of this process have put down."""

    def __init__(self) -> None:
        self.facts = KvppFacts()
        self.loads: LayerLoads | None = None


_PROCESS = _Process()


def publish(facts: KvppFacts) -> None:
    """The worker's word, before connectors are made."""
    _PROCESS.facts = facts


def published() -> KvppFacts:
    """The worker's word; empty without KVPP."""
    return _PROCESS.facts


def offer_layer_loads(loads: LayerLoads | None) -> None:
    """The connector's word: these loads have to end before their layers are broadcast."""
    _PROCESS.loads = loads


def layer_loads() -> LayerLoads | None:
    """The connector's word; None where no connector loads inside a step."""
    return _PROCESS.loads
