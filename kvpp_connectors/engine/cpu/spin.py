"""How ranks wait for the engine on CPU.

vLLM's ranks spin for a second after each message, yielding the core in between. Where there are
fewer cores than processes that do so, whole servers stand still for seconds: the ones that spin
keep the ones they wait for from running.
"""

from __future__ import annotations

import os
from functools import cache, partialmethod

from kvpp_connectors.log import get_logger

__all__ = ["SPIN_S", "sleep_soon"]

logger = get_logger(__name__)

SPIN_S = 0.002  # between two messages; then the rank sleeps until it is told of the next one


@cache  # once a process: an engine of one rank runs in its own, and there may be several
def sleep_soon(ranks: int) -> None:
    """Let this process's readers of message queues sleep, unless cores abound for ``ranks``.

    A rank alone has no queue.
    """
    cores = len(os.sched_getaffinity(0))
    if ranks == 1 or cores > 2 * ranks:
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__ = partialmethod(SpinCondition.__init__, busy_loop_s=SPIN_S)
    logger.info(
        "CPU profile: %d ranks on %d cores; they sleep %g ms after a message, not 1 s",
        ranks,
        cores,
        SPIN_S * 1e3,
    )
