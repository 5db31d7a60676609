"""Rows of the caches of sparse attention, as the CPU reference writes and reads them.

C8 rows hold float8_e4m3fn values in tiles of 128 with one float32 scale each, after the layout
that vLLM calls fp8_ds_mla: 656 bytes for the main cache (512 values, 4 scales, 64 bfloat16 rotary
values), 132 for the indexer's (128 values, 1 scale).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Rows", "indexer_rows", "main_rows"]

_TILE = 128  # values that share a scale
_LARGEST = 448.0  # of float8_e4m3fn
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Rows:
    """How values (T, n) become rows of a cache (blocks, block_size, width) and back."""

    encode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]

    def write(self, cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Write one row a slot; a negative slot is nowhere."""
        valid = slots >= 0
        flat = cache.view(-1, cache.shape[-1])
        flat[slots[valid].to(torch.long)] = self.encode(values[valid], cache.dtype)

    def read(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Rows at ``slots``, as float32 of slots' shape and one dimension more."""
        rows = cache.view(-1, cache.shape[-1])[slots.flatten()]
        return self.decode(rows).view(*slots.shape, -1)


def main_rows(kv_cache_dtype: str, latent: int) -> Rows:
    """Rows of a main cache: ``latent`` values and the rotary ones."""
    if kv_cache_dtype != "fp8_ds_mla":
        return _PLAIN
    scales = latent // _TILE * 4

    def encode(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rope = values[:, latent:].to(torch.bfloat16).contiguous().view(torch.uint8)
        return torch.cat((_quantize(values[:, :latent]), rope), dim=-1).view(dtype)

    def decode(rows: torch.Tensor) -> torch.Tensor:
        raw = rows.view(torch.uint8)
        rope = raw[:, latent + scales :].contiguous().view(torch.bfloat16).float()
        return torch.cat((_dequantize(raw[:, : latent + scales]), rope), dim=-1)

    return Rows(encode, decode)


def indexer_rows(c8: bool) -> Rows:
    """Rows of an indexer's cache."""
    if not c8:
        return _PLAIN
    return Rows(
        encode=lambda values, dtype: _quantize(values).view(dtype),
        decode=lambda rows: _dequantize(rows.view(torch.uint8)),
    )


_PLAIN = Rows(encode=lambda values, dtype: values.to(dtype), decode=lambda rows: rows.float())


def _quantize(values: torch.Tensor) -> torch.Tensor:
    """(T, n) values as (T, n + 4 n / 128) bytes: all values, then the scales of their tiles."""
    tiles = values.float().unflatten(-1, (-1, _TILE))
    scales = tiles.abs().amax(-1, keepdim=True).clamp(min=1e-10) / _LARGEST
    values_as_bytes = (tiles / scales).to(_FP8).view(torch.uint8).flatten(1)
    return torch.cat((values_as_bytes, scales.flatten(1).view(torch.uint8)), dim=-1)


def _dequantize(raw: torch.Tensor) -> torch.Tensor:
    """The inverse of `_quantize`, within the precision of float8."""
    count = raw.shape[-1] * _TILE // (_TILE + 4)
    values = raw[:, :count].contiguous().view(_FP8).float().unflatten(-1, (-1, _TILE))
    scales = raw[:, count:].contiguous().view(torch.float32)
    return torch.mul(values, scales.unsqueeze(-1)).flatten(1)
