"""What one process knows of itself, for those of its parts that vLLM makes apart from one another.

vLLM creates the worker and the connector independently; the worker puts down here what it laid out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvpp_connectors.connector.names import SWITCH
from kvpp_core.device.base import Fence
from kvpp_core.errors import KvppError
from kvpp_core.layout import RankLayout
from kvpp_core.manifest import Manifest
from kvpp_core.trace import SpanRecorder

__all__ = [
    "KvppFacts",
    "LayerLoads",
    "layer_loads",
    "offer_layer_loads",
    "publish",
    "published",
]


@dataclass(frozen=True, slots=True)
class KvppFacts:
    """What this process's worker laid out, and what its group agreed on; None without KVPP.

    ``spans`` is where its parts record when what ran; nothing switches it on without KVPP.
    """

    layout: RankLayout | None = None
    manifest: Manifest | None = None
    spans: SpanRecorder = field(default_factory=SpanRecorder, compare=False)


class LayerLoads(Protocol):
    """A connector that loads layers inside a step. Called from the thread that runs the model."""

    def take_fences(self) -> Mapping[int, Fence] | None:
        """This step's loads of this rank, by layer; None where no rank of the group loads."""

    def reached(self, layer: int) -> None:
        """The model is about to touch a layer's cache for the first time in this step."""

    def failed(self, layer: int, late: bool) -> None:
        """A layer was not loaded by its owner, or not in time: what depends on it is not valid."""


class _Process:
    """What the parts of this process have put down."""

    def __init__(self) -> None:
        self.facts = KvppFacts()
        self.loads: LayerLoads | None = None


_PROCESS = _Process()


def publish(facts: KvppFacts) -> None:
    """The worker's word, before connectors are made."""
    _PROCESS.facts = facts


def published(vllm_config: Any) -> KvppFacts:
    """The worker's word, for a connector of this launch.

    Raises:
        KvppError: the launch has KVPP on, and another package's: what it keeps is not known here.
    """
    given = vllm_config.additional_config
    on = isinstance(given, dict) and given.get(SWITCH) is True
    if on and _PROCESS.facts.layout is None:
        raise KvppError(
            f"additional_config.{SWITCH} is on, but this worker's KVPP is not that of "
            "kvpp-connectors: its scratch memory would be taken for cache. Use the connectors that "
            "come with it, or switch KVPP off"
        )
    return _PROCESS.facts


def offer_layer_loads(loads: LayerLoads | None) -> None:
    """The connector's word: these loads have to end before their layers are broadcast."""
    _PROCESS.loads = loads


def layer_loads() -> LayerLoads | None:
    """The connector's word; None where no connector loads inside a step."""
    return _PROCESS.loads
