"""A process that answers questions, one after the other: the far side of a benchmark."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

__all__ = ["AskedProcess", "answer_all"]

_BOUND_S = 600.0
_END_S = 30.0


class AskedProcess:
    """A child whose function takes its end of a pipe first, and calls `answer_all`."""

    def __init__(self, name: str, serve: Callable[..., None], *args: Any) -> None:
        self._name = name
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, *args)
        )
        self._process.start()
        theirs.close()  # so that the pipe ends with the child

    def ask(self, question: Any) -> Any:
        """The child's answer.

        Raises:
            RuntimeError: it ended, or did not answer in time.
        """
        try:
            self._pipe.send(question)
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


def answer_all(parent: Connection, answer: Callable[[Any], Any]) -> None:
    """In the child: answer until the parent closes the pipe."""
    while True:
        try:
            question = parent.recv()
        except EOFError:
            return
        parent.send(answer(question))
