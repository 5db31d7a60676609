"""Memory that packs and unpacks what is moved: all of it taken when it is made (design 6, 8)."""

from __future__ import annotations

import torch

__all__ = ["allocate_staging"]


def allocate_staging(size: int, device: torch.device | str) -> torch.Tensor:
    """``size`` bytes, every page of which is there: uint8 (size,), contiguous.

    Zeroed memory is given by the kernel when it is first written. A server whose staging came that
    way would grow under load, past what its memory was measured as at start-up, and could be
    killed for it at night instead of refused.
    """
    return torch.empty(size, dtype=torch.uint8, device=device).fill_(0)
