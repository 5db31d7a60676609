"""Files, threads, mappings and memory of a server's processes, and how far they may grow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import psutil

__all__ = ["Account", "Ledger"]


@dataclass(frozen=True, slots=True)
class Account:
    """Sums over the processes of an idle server."""

    processes: int
    files: int  # open descriptors
    threads: int
    maps: int  # mappings of memory
    resident: int  # bytes

    @classmethod
    def of(cls, processes: Iterable[psutil.Process]) -> Self:
        """Read the processes' accounts from /proc."""
        parts = [
            (
                process.num_fds(),
                process.num_threads(),
                len(Path(f"/proc/{process.pid}/maps").read_text().splitlines()),
                process.memory_info().rss,
            )
            for process in processes
        ]
        return cls(len(parts), *(sum(column) for column in zip(*parts, strict=True)))

    def __sub__(self, other: Account) -> Account:
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Account(*(one - before for one, before in pairs))

    def within(self, limit: Account) -> bool:
        """Whether no figure exceeds its limit."""
        return all(getattr(self, f.name) <= getattr(limit, f.name) for f in fields(self))


# How much a server may grow after its first round. Pools of connections and allocators fill up for
# a while; a leak per request or restart exceeds this within minutes.
GROWTH = Account(processes=0, files=24, threads=12, maps=300, resident=96 << 20)


class Ledger:
    """The accounts of one server, by run: from one restart to the next."""

    def __init__(self) -> None:
        self._runs: list[list[Account]] = []

    def restarted(self) -> None:
        """Begin a new run."""
        self._runs.append([])

    def note(self, account: Account) -> None:
        """Record the idle server's account."""
        self._runs[-1].append(account)

    @property
    def last(self) -> Account:
        """The latest account."""
        return self._runs[-1][-1]

    @property
    def moments(self) -> int:
        """How many accounts follow another one of their run."""
        return sum(len(run) - 1 for run in self._runs if run)

    @property
    def growth(self) -> Account:
        """The largest growth in any run, by figure."""
        grown = [run[-1] - run[0] for run in self._runs if run]
        return Account(*(max(getattr(g, f.name) for g in grown) for f in fields(Account)))
