"""What runs beside the model: nothing that ends with an error does so in silence."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from kvpp_connectors.log import get_logger
from kvpp_connectors.pool.store.base import Outcome, Result

__all__ = ["NOT_RUN", "one_thread", "tell_of_error"]

logger = get_logger(__name__)

NOT_RUN = Outcome(Result.FAILED, words="the load ended with an error")

Work = TypeVar("Work", bound=Future[Any])


def one_thread(name: str) -> ThreadPoolExecutor:
    """A thread that computes by itself: torch's helpers would take the model's processors, and
    packing would wait for them (half the speed on a busy machine).

    Threads that compute for the first time later on have no helpers either; one that has computed
    before, like the model's, keeps its own. vLLM on CPU puts a function that does nothing in the
    place of ``torch.set_num_threads``.
    """
    return ThreadPoolExecutor(1, name, initializer=torch._C.set_num_threads, initargs=(1,))


def tell_of_error(work: Work, consequence: str) -> Work:
    """Log ``work``'s error once it ends with one; ``work`` itself."""

    def tell(ended: Future[Any]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            logger.error("%s", consequence, exc_info=error)

    work.add_done_callback(tell)
    return work
