"""vLLM's SchedulerOutput as the core's ScheduledStep."""

from __future__ import annotations

from typing import Any

from kvpp_core.history import ScheduledRequest, ScheduledStep

__all__ = ["read_step"]


def read_step(output: Any) -> ScheduledStep:
    """New requests carry all their blocks, resumed ones too; others carry what was added.

    A KVPP engine has one cache group, hence ``block_ids[0]``.
    """
    new_tokens = output.num_scheduled_tokens
    new = [
        ScheduledRequest(
            request_id=request.req_id,
            block_ids=request.block_ids[0],
            computed_tokens=request.num_computed_tokens,
            new_tokens=new_tokens[request.req_id],
            replaces=True,
        )
        for request in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    continued = [
        ScheduledRequest(
            request_id=request_id,
            block_ids=block_ids[0] if block_ids is not None else (),
            computed_tokens=computed_tokens,
            new_tokens=new_tokens[request_id],
            replaces=request_id in cached.resumed_req_ids,
        )
        for request_id, block_ids, computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        )
    ]
    return ScheduledStep(requests=[*new, *continued], finished=output.finished_req_ids)
