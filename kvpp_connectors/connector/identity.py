"""What tells one engine's KV from another's."""

from __future__ import annotations

from typing import Any

__all__ = ["kv_cache_dtype"]


def kv_cache_dtype(config: Any) -> str:
    """The KV cache's dtype: "auto" means the model's, which may differ between two engines."""
    named = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype) if named == "auto" else named
