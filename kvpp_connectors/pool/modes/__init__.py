"""The ways in which blocks are loaded: whole, or layer by layer."""

from __future__ import annotations

from kvpp_connectors.pool.modes.base import LoadMode, RankShare
from kvpp_connectors.pool.modes.layerwise import Layerwise
from kvpp_connectors.pool.modes.whole_blocks import WholeBlocks
from kvpp_connectors.pool.options import PoolOptions
from kvpp_core.layout import RankLayout

__all__ = ["LoadMode", "RankShare", "create_mode"]


def create_mode(share: RankShare, options: PoolOptions, layout: RankLayout | None) -> LoadMode:
    """The mode that the options ask for; ``layout`` is KVPP's.

    Raises:
        KvppError: staging holds no object, or the store refused the memory.
    """
    if options.use_layerwise:
        return Layerwise(share, options.layerwise_prefetch_layers, layout)
    return WholeBlocks(share, options.load_async)
