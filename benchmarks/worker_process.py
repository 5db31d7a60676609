"""A child process that answers calls, one after the other: the far side of a benchmark."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

__all__ = ["WorkerProcess", "serve_calls"]

_BOUND_S = 600.0
_END_S = 30.0


class WorkerProcess:
    """A spawned child that runs ``serve(pipe, *args)``, which answers with `serve_calls`."""

    def __init__(self, name: str, serve: Callable[..., None], *args: Any) -> None:
        self._name = name
        self._pipe, child_end = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(child_end, *args)
        )
        self._process.start()
        child_end.close()  # the pipe then ends with the child

    def call(self, request: Any) -> Any:
        """The child's answer to a request.

        Raises:
            RuntimeError: it ended, or did not answer in time.
        """
        try:
            self._pipe.send(request)
            if not self._pipe.poll(_BOUND_S):
                raise RuntimeError(f"{self._name} did not answer within {_BOUND_S:g} s")
            return self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise RuntimeError(f"{self._name} ended; what it printed says why") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(_END_S)
        self._process.kill()


def serve_calls(parent: Connection, answer: Callable[[Any], Any]) -> None:
    """In the child: answer requests until the parent closes the pipe."""
    while True:
        try:
            request = parent.recv()
        except EOFError:
            return
        parent.send(answer(request))
