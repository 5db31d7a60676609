"""What one process knows of itself, for those of its parts that vLLM makes apart from one another.

vLLM creates the worker and the connector independently; the worker puts down here what it laid out.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvpp_connectors.connector.names import SWITCH
from kvpp_connectors.connector.transfer_engine import TransferEngine
from kvpp_connectors.log import get_logger
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
    "process_engine",
    "publish",
    "published",
]

logger = get_logger(__name__)


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
    """What the parts of this process share: the only state of a module in this package."""

    def __init__(self) -> None:
        self.facts = KvppFacts()
        self.loads: LayerLoads | None = None
        self.engine: TransferEngine | None = None
        self.making_engine = threading.Lock()


_PROCESS = _Process()


def publish(facts: KvppFacts) -> None:
    """To be called by the worker, before connectors are made."""
    _PROCESS.facts = facts


def published(vllm_config: Any) -> KvppFacts:
    """What this process's worker laid out, for a connector of this launch.

    Raises:
        KvppError: the launch has KVPP on, and another package's: what it keeps is not known here.
    """
    additional = vllm_config.additional_config
    on = isinstance(additional, dict) and additional.get(SWITCH) is True
    if on and _PROCESS.facts.layout is None:
        raise KvppError(
            f"additional_config.{SWITCH} is on, but this worker's KVPP is not that of "
            "kvpp-connectors: its scratch memory would be taken for cache. Use the connectors that "
            "come with it, or switch KVPP off"
        )
    return _PROCESS.facts


def offer_layer_loads(loads: LayerLoads | None) -> None:
    """To be called by a connector: these loads have to end before their layers are broadcast."""
    _PROCESS.loads = loads


def layer_loads() -> LayerLoads | None:
    """What a connector offered; None where none loads inside a step."""
    return _PROCESS.loads


def process_engine(host: str, protocol: str) -> TransferEngine:
    """The one transfer engine of this process, made at the first call.

    Raises:
        KvppError: it cannot start, or was started with another protocol.
    """
    with _PROCESS.making_engine:
        if _PROCESS.engine is None:
            _PROCESS.engine = TransferEngine(host, protocol)
            logger.info("transfer engine %s over %s", _PROCESS.engine.session, protocol)
        elif _PROCESS.engine.protocol != protocol:
            raise KvppError(
                f"this process already transfers over {_PROCESS.engine.protocol}, not {protocol}: "
                "give all connectors one protocol"
            )
        return _PROCESS.engine
