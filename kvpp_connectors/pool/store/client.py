"""What the backends have in common: a client that is set up once, asked by key, and retried."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar

from kvpp_connectors.log import get_logger
from kvpp_connectors.pool.store.base import Buffer, Outcome, PoolUnavailable, Result
from kvpp_connectors.pool.store.codes import CodeBook, NoAnswer, ask
from kvpp_connectors.pool.store.handle import Handle

__all__ = ["PROBE", "StoreBackend"]

logger = get_logger(__name__)

PROBE = "kvpp-probe"  # a key that nobody saves


class StoreBackend(ABC):
    """A Backend over a store's own client object, which knows objects by key and memory by address.

    Connecting and registering may come in any order; what is registered before is told to the
    client when it is set up.
    """

    _book: ClassVar[CodeBook]
    _close_wait_s: ClassVar[float]  # for calls that are inside when the client is closed

    def __init__(self) -> None:
        self._handle: Handle[Any] = Handle(self._book.store)
        self._connecting = threading.Lock()
        self._naming = threading.Lock()  # of memory, to the client or for later
        self._closing = threading.Event()
        self._regions: dict[int, int] = {}  # address -> bytes

    def connect(self) -> None:
        """See Backend."""
        with self._connecting:
            if self._closing.is_set():
                raise PoolUnavailable(f"the {self._book.store} client is closed")
            if not self._handle.ready:
                client = self._set_up()
                with ExitStack() as refused, self._naming:
                    refused.callback(client.close)
                    for address, size in self._regions.items():
                        self._register(client, address, size)
                    if self._handle.set(client):
                        refused.pop_all()
            self.exist([PROBE])

    def register(self, address: int, size: int) -> None:
        """See Backend."""
        if not self._registers:
            return
        with self._naming:  # a set-up that hangs, as MemCache's may, holds nobody here
            if self._regions.get(address) == size:
                return
            if self._handle.ready:
                with self._handle.use() as client:
                    self._register(client, address, size)
            self._regions[address] = size

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """See Backend."""
        if not keys:
            return []
        with self._handle.use() as client:
            try:
                codes = ask(lambda: client.batch_is_exist(list(keys)), keys, "batch_is_exist")
            except NoAnswer as error:
                raise PoolUnavailable(f"{self._book.store}: {error}") from error
        wrong = [code for code in codes if code < 0]
        if wrong:
            raise PoolUnavailable(self._refusal(self._book.outcome(wrong[0]), len(keys)))
        return [code == 1 for code in codes]

    def client(self) -> AbstractContextManager[Any]:
        """The store's own client, for one call.

        Raises:
            PoolUnavailable: it is not connected, or closed.
        """
        return self._handle.use()

    def close(self) -> None:
        """See Backend."""
        self._closing.set()
        if not self._handle.close(lambda client: client.close(), self._close_wait_s):
            logger.warning(
                "calls into %s did not end within %.0f s; its client stays open until this "
                "process ends",
                self._book.store,
                self._close_wait_s,
            )

    @property
    @abstractmethod
    def _registers(self) -> bool:
        """Whether the client has to be told of memory."""

    @abstractmethod
    def _set_up(self) -> Any:
        """A client that answers; one that failed must not be touched again."""

    @abstractmethod
    def _register(self, client: Any, address: int, size: int) -> None:
        """Tell a client of memory. Raises KvppError where it refuses."""

    @abstractmethod
    def _refusal(self, outcome: Outcome, keys: int) -> str:
        """Why so many keys could not be looked for, and where."""

    @abstractmethod
    def _put(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
        """Store objects that are not there, in one try."""

    def _put_missing(
        self,
        keys: Sequence[str],
        buffers: Sequence[Buffer],
        outcomes: list[Outcome],
        missing: list[int],
        pauses_s: Sequence[float],
        is_full: Callable[[Outcome], bool],
    ) -> None:
        """Store ``missing`` into ``outcomes``; try again where there was no room, after pauses."""
        for pause_s in (*pauses_s, None):
            ended = self._put([keys[i] for i in missing], [buffers[i] for i in missing])
            for i, outcome in zip(missing, ended, strict=True):
                outcomes[i] = outcome
            missing = [i for i in missing if is_full(outcomes[i])]
            if not missing or pause_s is None or self._closing.wait(pause_s):
                return

    def _call(
        self, keys: Sequence[str], what: str, call: Callable[[Any], object]
    ) -> list[int] | Outcome:
        """One code a key, or the outcome of all keys."""
        if not keys:
            return []
        try:
            with self._handle.use() as client:
                return ask(lambda: call(client), keys, what)
        except PoolUnavailable as error:
            return Outcome(Result.UNAVAILABLE, words=str(error))
        except NoAnswer as error:
            return Outcome(Result.FAILED, words=str(error))
