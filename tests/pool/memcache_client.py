"""A process with our backend over MemCache's real client: ``python -m tests.pool.memcache_client``.

Reads ``[method, arguments]`` a line, and writes what the method returned after the word ANSWER.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvpp_connectors.pool.lookup import Lookup, PendingLookup
from kvpp_connectors.pool.stats import PoolStats
from kvpp_connectors.pool.store.base import PoolUnavailable
from kvpp_connectors.pool.store.memcache import MemCacheStore, MemoryKind, new_client
from kvpp_connectors.pool.store.resilient import ResilientStore


class Served:
    """What a test may ask for."""

    def __init__(self, moves_data: bool) -> None:
        self._clients: list[Any] = []
        self._backend = MemCacheStore(
            MemoryKind.HOST, 0, moves_data=moves_data, client=self._new_client
        )
        self._stats = PoolStats("scheduler")
        self._guard: ResilientStore | None = None
        self._lookup: Lookup | None = None
        self._asked: dict[str, PendingLookup] = {}

    def connect(self) -> None:
        """And name memory, which a scheduler's backend must not hand on."""
        self._backend.connect()
        self._backend.register(4096, 4096)

    def exist(self, keys: Sequence[str]) -> list[bool]:
        return self._backend.exist(keys)

    def exist_in_threads(self, threads: int, rounds: int) -> int:
        """Lookups of several threads over the one client; how many answered "not there"."""
        with ThreadPoolExecutor(threads) as pool:
            answers = pool.map(
                lambda i: self._backend.exist([f"kvpp1@{i}-{k}" for k in range(64)]),
                range(threads * rounds),
            )
            return sum(answer == [False] * 64 for answer in answers)

    def raw(self, method: str, *arguments: Any) -> Any:
        """A method of the store's own client."""
        return getattr(self._clients[-1], method)(*arguments)

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Of the store's own key infos, bytes."""
        return [info.size() for info in self._clients[-1].batch_get_key_info(keys)]

    def outcome(self, code: int) -> list[str]:
        """What our backend takes a code for."""
        outcome = self._backend._book.outcome(code)
        return [outcome.result, outcome.words]

    def guard(self, deadline_s: float) -> None:
        """As the connector does: behind a breaker, lookups on a thread of their own."""
        self._guard = ResilientStore(self._backend, self._stats, opens_after=2, pause_s=0.1)
        self._lookup = Lookup(self._guarded_exist, self._stats, deadline_s=deadline_s)

    def ready(self, timeout_s: float) -> bool:
        assert self._guard is not None
        return self._guard.wait_ready(timeout_s)

    def state(self) -> list[str]:
        """Of the breaker, and why."""
        assert self._guard is not None
        return [self._guard.state.name, self._guard.reason]

    def ask(self, request: str, blocks: Sequence[Sequence[str]], wait_s: float) -> list[Any]:
        """A lookup as the scheduler sees it: blocks hit, what shortened it, seconds it took."""
        assert self._lookup is not None
        started = time.monotonic()
        asked = self._asked[request] = self._lookup.ask(
            request, self._asked.get(request), blocks, wait_s
        )
        hit = asked.hit
        took_s = time.monotonic() - started
        return [hit and hit.blocks, hit and hit.shortened_by, took_s]

    def clients(self) -> int:
        """How many clients of the store were made."""
        return len(self._clients)

    def close(self) -> None:
        if self._lookup is not None:
            self._lookup.close()
        (self._guard or self._backend).close()

    def _new_client(self) -> Any:
        self._clients.append(new_client())
        return self._clients[-1]

    def _guarded_exist(self, keys: Sequence[str]) -> list[bool]:
        assert self._guard is not None
        return self._guard.exist(keys)


def main() -> None:
    """Serve until the end of the input."""
    served = Served(moves_data=sys.argv[1] == "worker")
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer = getattr(served, method)(*arguments)
        except PoolUnavailable as error:
            answer = {"unavailable": str(error)}
        print("ANSWER" + json.dumps(answer), flush=True)
    served.close()


if __name__ == "__main__":
    main()
