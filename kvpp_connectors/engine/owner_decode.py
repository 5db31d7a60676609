"""Decode tokens attend at the owner of each layer, so that no history moves for them.

The seam is ``forward_mqa`` of a layer's attention implementation, which vLLM calls with the query
heads of all decode tokens of a step. It takes them in latent space, so that the owner needs no
weights of another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from kvpp_core.errors import KvppError
from kvpp_core.exchange import HeadExchange

__all__ = ["attend_at_owners", "unfit"]

# Those whose forward_mqa takes any number of heads and prepares nothing for one.
_IMPLEMENTATIONS = ("CPUMLAImpl",)


def unfit(layers: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Why the layers of these names cannot attend at their owners, or None."""
    for name in names:
        kind = type(layers[name].impl).__name__
        if kind not in _IMPLEMENTATIONS:
            return (
                f"{name} attends by {kind}; decode at the owner is made for "
                f"{', '.join(_IMPLEMENTATIONS)}"
            )
    return None


def attend_at_owners(
    exchange: HeadExchange,
    layers: Mapping[str, Any],
    owners: Mapping[str, tuple[int, int]],
    decode_tokens: Callable[[], int | None],
) -> None:
    """Hook the attention of each target layer.

    Args:
        exchange: takes queries to a layer's owner and brings results back.
        layers: vLLM's attention layers, by name.
        owners: each target layer's index and the group rank that keeps it, by the layer's name.
        decode_tokens: of the running step, those that rely on attention at the owners; None where
            all tokens attend here.

    Raises:
        KvppError: a layer's attention implementation is not one of those known to take it.
    """
    if (reason := unfit(layers, owners)) is not None:
        raise KvppError(f"kvpp.decode: {reason}. Use decode = broadcast.")
    for name, (layer, owner) in owners.items():
        implementation = layers[name].impl
        implementation.forward_mqa = _at_owner(
            implementation, exchange, (layer, owner), name, decode_tokens
        )


def _at_owner(
    implementation: Any,
    exchange: HeadExchange,
    place: tuple[int, int],
    name: str,
    decode_tokens: Callable[[], int | None],
) -> Callable[..., Any]:
    original, width = implementation.forward_mqa, implementation.kv_lora_rank
    index, owner = place

    def forward_mqa(
        q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, None]:
        expected = decode_tokens()
        if expected is None:
            return original(q, kv_c_and_k_pe_cache, attn_metadata, layer)  # type: ignore[no-any-return]
        if attn_metadata.num_decode_tokens < expected:
            raise KvppError(
                f"{name}: vLLM counts {attn_metadata.num_decode_tokens} decode tokens, KVPP "
                f"{expected}: the history of some was not broadcast. Use decode = broadcast."
            )
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        result = exchange.attend(
            index,
            owner,
            query,
            width,
            lambda whole: original(whole, kv_c_and_k_pe_cache, attn_metadata, layer)[0],
        )
        return result, None

    return forward_mqa
