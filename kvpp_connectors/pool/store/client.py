"""A Store over a store's own client object: set up once, asked by key, retried, closed once.

A store answers a batch with one integer a key. Whatever else comes back (a short list, None, an
exception out of the binding) is an outcome, too: a broken store costs speed, never a request.

The client object is never touched before it is set up, nor after it is closed: both would end the
process with a segmentation fault, in Mooncake and in MemCache alike.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from kvpp_connectors.log import get_logger
from kvpp_connectors.pool.store.base import Buffer, PoolUnavailable, StoreOutcome, StoreResult

__all__ = ["PROBE", "CodeBook", "NoAnswer", "StoreClient", "ask"]

logger = get_logger(__name__)

PROBE = "kvpp-probe"  # a key that nobody saves


class NoAnswer(RuntimeError):
    """A call into a store gave no list of one integer a key."""


@dataclass(frozen=True, slots=True)
class CodeBook:
    """What a store's codes mean."""

    store: str
    meanings: Mapping[int, tuple[StoreResult, str]]

    def outcome(self, code: int) -> StoreOutcome:
        """A code that is not a success. One that nobody knows is FAILED."""
        result, words = self.meanings.get(
            code, (StoreResult.FAILED, f"a code that {self.store} does not explain")
        )
        return StoreOutcome(result, code, words)

    def of_load(self, code: int) -> StoreOutcome:
        """The same for a load, for which what makes a save good ("already there") is a failure."""
        outcome = self.outcome(code)
        return StoreOutcome(StoreResult.FAILED, code, outcome.words) if outcome.ok else outcome


def ask(call: Callable[[], object], keys: Sequence[str], what: str) -> list[int]:
    """Make a call that answers with one integer a key.

    Raises:
        NoAnswer: it answered something else; says what.
    """
    try:
        answer = call()
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise NoAnswer(f"{what} raised {type(error).__name__}: {error}") from error
    if not isinstance(answer, list) or not all(isinstance(code, int) for code in answer):
        raise NoAnswer(f"{what} answered {type(answer).__name__}; expected a list of codes")
    if len(answer) != len(keys):
        raise NoAnswer(f"{what} gave {len(answer)} codes for {len(keys)} keys")
    return answer


class StoreClient(ABC):
    """What the stores have in common.

    Connecting and registering may come in any order; what is registered before is given to the
    client when it is set up.
    """

    _book: ClassVar[CodeBook]
    _close_wait_s: ClassVar[float]  # for calls that are inside when the client is closed

    def __init__(self) -> None:
        self._connecting = threading.Lock()
        self._naming = threading.Lock()  # of memory, to the client or for later
        self._closing = threading.Event()
        self._regions: dict[int, int] = {}  # address -> bytes
        self._changed = threading.Condition()  # guards what follows
        self._client: Any = None  # from its set-up to its closing
        self._calls = 0  # that are in the client

    def connect(self) -> None:
        with self._connecting:
            if self._closing.is_set():
                raise PoolUnavailable(f"the {self._book.store} client is closed")
            if not self._is_set_up:
                client = self._set_up()
                with ExitStack() as refused, self._naming:
                    refused.callback(client.close)
                    for address, size in self._regions.items():
                        self._register(client, address, size)
                    if self._let_in(client):
                        refused.pop_all()
            self.exist([PROBE])

    def register(self, address: int, size: int) -> None:
        if not self._registers:
            return
        with self._naming:  # a set-up that hangs, as MemCache's may, holds nobody here
            if self._regions.get(address) == size:
                return
            if self._is_set_up:
                with self.client() as client:
                    self._register(client, address, size)
            self._regions[address] = size

    def exist(self, keys: Sequence[str]) -> list[bool]:
        if not keys:
            return []
        with self.client() as client:
            try:
                codes = ask(lambda: client.batch_is_exist(list(keys)), keys, "batch_is_exist")
            except NoAnswer as error:
                raise PoolUnavailable(f"{self._book.store}: {error}") from error
        wrong = [code for code in codes if code < 0]
        if wrong:
            raise PoolUnavailable(self._refusal(self._book.outcome(wrong[0]), len(keys)))
        return [code == 1 for code in codes]

    @contextmanager
    def client(self) -> Iterator[Any]:
        """The store's own client, for one call.

        Raises:
            PoolUnavailable: it is not connected, or closed.
        """
        with self._changed:
            if self._client is None:
                state = "closed" if self._closing.is_set() else "not connected yet"
                raise PoolUnavailable(f"the {self._book.store} client is {state}")
            client = self._client
            self._calls += 1
        try:
            yield client
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """See Store. A client whose calls do not end is left alone: freeing it under a call would
        end the process."""
        with self._changed:
            self._closing.set()
            client, self._client = self._client, None
            left = self._changed.wait_for(lambda: not self._calls, timeout=self._close_wait_s)
        if not left:
            logger.warning(
                "calls into %s did not end within %.0f s; its client stays open until this "
                "process ends",
                self._book.store,
                self._close_wait_s,
            )
        elif client is not None:
            client.close()

    @property
    @abstractmethod
    def _registers(self) -> bool:
        """Whether the client has to register memory."""

    @abstractmethod
    def _set_up(self) -> Any:
        """A client that answers; one that failed must not be touched again."""

    @abstractmethod
    def _register(self, client: Any, address: int, size: int) -> None:
        """Register memory with a client. Raises KvppError where it refuses."""

    @abstractmethod
    def _refusal(self, outcome: StoreOutcome, keys: int) -> str:
        """Why so many keys could not be looked for, and where."""

    @abstractmethod
    def _put(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[StoreOutcome]:
        """Store objects that are not there, in one try."""

    def _put_missing(
        self,
        keys: Sequence[str],
        buffers: Sequence[Buffer],
        outcomes: list[StoreOutcome],
        missing: list[int],
        pauses_s: Sequence[float],
        is_full: Callable[[StoreOutcome], bool],
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
    ) -> list[int] | StoreOutcome:
        """One code a key, or the outcome of all keys."""
        if not keys:
            return []
        try:
            with self.client() as client:
                return ask(lambda: call(client), keys, what)
        except PoolUnavailable as error:
            return StoreOutcome(StoreResult.UNAVAILABLE, words=str(error))
        except NoAnswer as error:
            return StoreOutcome(StoreResult.FAILED, words=str(error))

    @property
    def _is_set_up(self) -> bool:
        with self._changed:
            return self._client is not None

    def _let_in(self, client: Any) -> bool:
        """Let calls into a client. False if this was closed meanwhile: the caller keeps it."""
        with self._changed:
            if self._closing.is_set():
                return False
            self._client = client
            return True
