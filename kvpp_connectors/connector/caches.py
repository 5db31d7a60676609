"""The names of a layer's cache tensors: vLLM keeps one tensor a layer, vllm-ascend a tuple."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["layer_name", "part_name", "single_tensors"]


def part_name(layer: str, index: int) -> str:
    """The name of one tensor of a layer's tuple: a component of the layer's bundle."""
    return f"{layer}[{index}]"


def layer_name(part: str) -> str:
    """The layer of a part's name."""
    return part.rpartition("[")[0]


def single_tensors(caches: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every cache tensor by a name of its own, from what a connector is given for each layer."""
    found: dict[str, torch.Tensor] = {}
    for layer, cache in caches.items():
        if isinstance(cache, torch.Tensor):
            found[layer] = cache
        else:
            found.update((part_name(layer, index), part) for index, part in enumerate(cache))
    return found
