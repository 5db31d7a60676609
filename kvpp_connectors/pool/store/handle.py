"""A store's client object that is never touched before it is set up, nor after it is closed.

Both would end the process with a segmentation fault, in Mooncake and in MemCache alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from kvpp_connectors.pool.store.base import PoolUnavailable

__all__ = ["Handle"]

T = TypeVar("T")


class Handle(Generic[T]):
    """Holds a client from set() to close(), and knows how many calls are in it."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._client: T | None = None
        self._calls = 0
        self._closed = False

    @property
    def ready(self) -> bool:
        """Whether there is a client."""
        with self._changed:
            return self._client is not None

    def set(self, client: T) -> bool:
        """Let calls in. False if it was closed meanwhile: the caller keeps the client."""
        with self._changed:
            if self._closed:
                return False
            self._client = client
            return True

    @contextmanager
    def use(self) -> Iterator[T]:
        """The client, for one call.

        Raises:
            PoolUnavailable: it is not connected, or closed.
        """
        with self._changed:
            if self._client is None:
                state = "closed" if self._closed else "not connected yet"
                raise PoolUnavailable(f"the {self._store} client is {state}")
            client = self._client
            self._calls += 1
        try:
            yield client
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def close(self, release: Callable[[T], object], wait_s: float) -> bool:
        """Let no more calls in, wait for those inside, then release the client.

        False if calls were still inside after ``wait_s`` seconds: the client is left alone then,
        for freeing it under a call would end the process.
        """
        ends = time.monotonic() + wait_s
        with self._changed:
            self._closed = True
            client, self._client = self._client, None
            while self._calls:
                left = ends - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        if client is not None:
            release(client)
        return True
