"""What prefill tells decode about a finished request, in ``kv_transfer_params``.

The keys are those of NIXL and vllm-ascend, so that their proxies pass them on, and one of our own,
``kvpp``. On arrival at decode they are a stranger's: they are read by a schema with limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvpp_connectors.p2p.protocol import Count, Port, Short, WorkerAddress

__all__ = [
    "PARAMS_VERSION",
    "BadTransferParams",
    "TransferLease",
    "TransferParams",
    "make_params",
    "read_params",
]

PARAMS_VERSION = 1
Blocks = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]], msgspec.Meta(max_length=1 << 20)
]


class BadTransferParams(ValueError):
    """kv_transfer_params that cannot be read."""


class TransferLease(msgspec.Struct, frozen=True):
    """The field ``kvpp``: which lease, and the endpoints of all prefill workers."""

    version: int
    transfer_id: Short
    generation: Count
    workers: Annotated[list[WorkerAddress], msgspec.Meta(min_length=1, max_length=4096)]


class TransferParams(msgspec.Struct, frozen=True):
    """A prefilled request that can be read. ``remote_host`` and ``remote_port`` keep its lease."""

    remote_engine_id: Short
    remote_host: Short
    remote_port: Port
    remote_block_ids: Annotated[list[Blocks], msgspec.Meta(min_length=1, max_length=1)]
    remote_num_tokens: Count
    remote_block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    kvpp: TransferLease

    @property
    def blocks(self) -> list[int]:
        """Blocks of the prompt, in order."""
        return self.remote_block_ids[0]

    def lease(self, party: str) -> tuple[str, int, str]:
        """How a message of ``party`` names the lease: transfer id, generation, party."""
        return self.kvpp.transfer_id, self.kvpp.generation, party


def make_params(
    params: TransferParams, request_id: str, tp: int, pp: int, pcp: int
) -> dict[str, Any]:
    """``kv_transfer_params`` of a finished prefill request: JSON values only."""
    return {
        **msgspec.to_builtins(params),
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": request_id,
        "num_prompt_blocks": len(params.blocks),
        "tp_size": tp,
        "pp_size": pp,
        "remote_ptp_size": tp,
        "remote_pcp_size": pcp,
        "remote_dcp_size": 1,
    }


def read_params(kv_transfer_params: Mapping[str, Any]) -> TransferParams:
    """The typed ``kv_transfer_params``; other keys are left alone.

    Raises:
        BadTransferParams: a key is missing or has a value that it cannot have; names it.
    """
    try:
        params = msgspec.convert(dict(kv_transfer_params), TransferParams)
        msgspec.msgpack.encode(params)  # its texts will be sent on: half a surrogate cannot be
    except (msgspec.ValidationError, UnicodeError) as error:
        raise BadTransferParams(f"kv_transfer_params: {error}") from error
    if params.kvpp.version != PARAMS_VERSION:
        raise BadTransferParams(
            f"kv_transfer_params: the prefill side speaks version {params.kvpp.version}, this side "
            f"{PARAMS_VERSION}"
        )
    if len(params.blocks) != -(-params.remote_num_tokens // params.remote_block_size):
        raise BadTransferParams(
            f"kv_transfer_params: {len(params.blocks)} blocks of {params.remote_block_size} tokens "
            f"for {params.remote_num_tokens} tokens"
        )
    return params
