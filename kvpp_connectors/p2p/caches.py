"""Where a worker's caches lie in memory, and which of them a peer may read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvpp_connectors.p2p.protocol import Region
from kvpp_core.errors import KvppError
from kvpp_core.layout import RankLayout

__all__ = ["cache_regions", "kept_components"]


def kept_components(
    kv_caches: Mapping[str, torch.Tensor], layout: RankLayout | None
) -> dict[str, torch.Tensor]:
    """The caches that this worker keeps for good: with KVPP its own layers and its drafts.

    Scratch memory is never read by a peer.
    """
    if layout is None:
        return dict(kv_caches)
    placement = layout.placement
    bundles = [*(placement.bundles[i] for i in placement.owned), *placement.drafts]
    return {c.name: kv_caches[c.name] for bundle in bundles for c in bundle.components}


def cache_regions(caches: Mapping[str, torch.Tensor]) -> list[Region]:
    """Where each cache's blocks lie. A cache is (blocks, ...), one block dense in memory.

    Raises:
        KvppError: the bytes of a block are not in one piece.
    """
    regions = []
    for name, cache in caches.items():
        blocks, size = cache.shape[0], cache.element_size()
        if not cache[0].is_contiguous():
            raise KvppError(
                f"a block of {name} is not in one piece; set VLLM_KV_CACHE_LAYOUT=LBNHC"
            )
        regions.append(
            Region(
                name=name,
                base=cache.data_ptr(),
                stride=cache.stride(0) * size,
                block_bytes=cache[0].numel() * size,
                num_blocks=blocks,
            )
        )
    return regions
