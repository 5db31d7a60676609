"""Threads beside the model: they use the worker's device, and none ends in silence.

A thread starts on device 0 and its default stream, whatever device the worker's own thread uses:
an event that it records there says nothing about the work of another device. Every thread of the
connectors is made here, and one that touches device memory is given the worker's device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from kvpp_connectors.log import get_logger

__all__ = ["log_error", "make_executor", "start_thread"]

logger = get_logger(__name__)

Work = TypeVar("Work", bound=Future[Any])


def make_executor(
    name: str, threads: int = 1, *, device: torch.device | None = None
) -> ThreadPoolExecutor:
    """An executor whose threads are ready for ``device`` before their first work.

    Args:
        name: prefix of the threads' names.
        threads: how many run at the same time.
        device: where the memory lies that they touch; None for threads that touch none.
    """
    return ThreadPoolExecutor(threads, name, initializer=_prepare, initargs=(device,))


def start_thread(
    name: str, run: Callable[[], None], consequence: str, *, device: torch.device | None = None
) -> threading.Thread:
    """Run a loop on a daemon thread.

    Args:
        name: of the thread.
        run: the loop; returns when it is asked to stop.
        consequence: what does not work any more if ``run`` ends with an error, for the log.
        device: where the memory lies that it touches; None for a thread that touches none.
    """

    def body() -> None:
        try:
            _prepare(device)
            run()
        except BaseException as error:
            logger.error("thread %s ended with an error: %s", name, consequence, exc_info=error)
            raise

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread


def log_error(work: Work, consequence: str) -> Work:
    """Log ``consequence`` and the error of ``work`` if it ends with one; returns ``work``."""

    def log(ended: Future[Any]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            logger.error("%s", consequence, exc_info=error)

    work.add_done_callback(log)
    return work


def _prepare(device: torch.device | None) -> None:
    """Compute without torch's helper threads, on a stream of ``device`` of one's own.

    The helpers would take the model's processors, and packing would wait for them (half the speed
    on a busy machine). Threads that compute for the first time later have no helpers either; one
    that has computed before, like the model's, keeps its own. vLLM on CPU puts a function that does
    nothing in the place of ``torch.set_num_threads``.
    """
    torch._C.set_num_threads(1)
    if device is not None and device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
        torch.accelerator.set_stream(torch.Stream(device))
