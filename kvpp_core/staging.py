"""Memory that packs and unpacks what is moved: all of it taken when it is made (design 6, 8)."""

from __future__ import annotations

import torch

__all__ = ["allocate_staging"]


def allocate_staging(size: int, device: torch.device | str, alignment: int = 1) -> torch.Tensor:
    """``size`` bytes, every page of which is there: uint8 (size,), contiguous, from an address that
    is a multiple of ``alignment`` bytes.

    Zeroed memory is given by the kernel when it is first written. A server whose staging came that
    way would grow under load, past what its memory was measured as at start-up, and could be
    killed for it at night instead of refused.
    """
    memory = torch.empty(size + alignment - 1, dtype=torch.uint8, device=device).fill_(0)
    start = -memory.data_ptr() % alignment
    return memory[start : start + size]
