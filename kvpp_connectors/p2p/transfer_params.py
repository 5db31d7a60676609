"""What prefill tells decode about a finished request, in ``kv_transfer_params``.

The keys are those of NIXL and vllm-ascend, so that their proxies pass them on, and one of our own,
``kvpp``. On arrival at decode they are a stranger's words: they are read by a schema with limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvpp_connectors.p2p.protocol import Count, Port, Short, WorkerAddress

__all__ = ["OFFER_VERSION", "BadOffer", "Offer", "OfferDetails", "make_params", "read_offer"]

OFFER_VERSION = 1
Blocks = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]], msgspec.Meta(max_length=1 << 20)
]


class BadOffer(ValueError):
    """kv_transfer_params that cannot be read."""


class OfferDetails(msgspec.Struct, frozen=True):
    """The field ``kvpp``: which lease, and the endpoints of all prefill workers."""

    version: int
    transfer_id: Short
    generation: Count
    workers: Annotated[list[WorkerAddress], msgspec.Meta(min_length=1, max_length=4096)]


class Offer(msgspec.Struct, frozen=True):
    """A prefilled request that can be read. ``remote_host`` and ``remote_port`` keep its lease."""

    remote_engine_id: Short
    remote_host: Short
    remote_port: Port
    remote_block_ids: Annotated[list[Blocks], msgspec.Meta(min_length=1, max_length=1)]
    remote_num_tokens: Count
    remote_block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    kvpp: OfferDetails

    @property
    def blocks(self) -> list[int]:
        """Blocks of the prompt, in order."""
        return self.remote_block_ids[0]

    def lease(self, party: str) -> tuple[str, int, str]:
        """How a message of ``party`` names the lease: transfer id, generation, party."""
        return self.kvpp.transfer_id, self.kvpp.generation, party


def make_params(offer: Offer, request_id: str, tp: int, pp: int, pcp: int) -> dict[str, Any]:
    """``kv_transfer_params`` of a finished prefill request: JSON values only."""
    return {
        **msgspec.to_builtins(offer),
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": request_id,
        "num_prompt_blocks": len(offer.blocks),
        "tp_size": tp,
        "pp_size": pp,
        "remote_ptp_size": tp,
        "remote_pcp_size": pcp,
        "remote_dcp_size": 1,
    }


def read_offer(params: Mapping[str, Any]) -> Offer:
    """The offer in ``kv_transfer_params``; other keys are left alone.

    Raises:
        BadOffer: a key is missing or has a value that it cannot have; names it.
    """
    try:
        offer = msgspec.convert(dict(params), Offer)
        msgspec.msgpack.encode(offer)  # its words will be sent on: half a surrogate cannot be
    except (msgspec.ValidationError, UnicodeError) as error:
        raise BadOffer(f"kv_transfer_params: {error}") from error
    if offer.kvpp.version != OFFER_VERSION:
        raise BadOffer(
            f"kv_transfer_params: the prefill side speaks version {offer.kvpp.version}, this side "
            f"{OFFER_VERSION}"
        )
    if len(offer.blocks) != -(-offer.remote_num_tokens // offer.remote_block_size):
        raise BadOffer(
            f"kv_transfer_params: {len(offer.blocks)} blocks of {offer.remote_block_size} tokens "
            f"for {offer.remote_num_tokens} tokens"
        )
    return offer
