"""Workers that move no bytes: they know what every slot of every block holds, and check it.

A slot's content is a number that depends on all tokens up to its own. The stand-in does what the
connectors' step messages tell it, at the moments that the test chooses, and raises AssertionError
as soon as anything is read that is not what its reader takes it for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpp_connectors.p2p.messages import Pull, StepMetadata
from kvpp_connectors.pool.keys import Namespace
from kvpp_connectors.pool.messages import BlockJob, Life, PoolStep

__all__ = ["BLOCK", "Content", "Ending", "StandInStore", "StandInWorkers", "contents", "next_token"]

BLOCK = 16  # tokens
VOCABULARY = 50
Content = int
_GARBAGE = -1

StandInStore = dict[str, tuple[Content, ...]]  # what a pool holds, by key


def contents(tokens: Sequence[int]) -> list[Content]:
    """What the slots of a request with these tokens hold."""
    found, so_far = [], 0
    for token in tokens:
        so_far = hash((so_far, token)) & 0xFFFFFFFF
        found.append(so_far)
    return found


def next_token(content: Content) -> int:
    """What the model answers to a prompt whose last slot holds ``content``."""
    return 2 + content % VOCABULARY


@dataclass(slots=True)
class Ending:
    """Which transfers end in this step, by position among those under way; the rest go on."""

    good: frozenset[int] = frozenset()
    bad: frozenset[int] = frozenset()
    loads_fail: bool = False  # of those that the step itself waits for
    still_read: bool = False  # pulls that are cancelled in this step: they end in a later one


@dataclass(slots=True)
class _Transfer:
    """A save, a load or a pull that is under way."""

    request_id: str
    what: BlockJob | Pull
    is_save: bool = False

    @property
    def life(self) -> Life | None:
        """Of a save or a load."""
        return self.what.life if isinstance(self.what, BlockJob) else None


@dataclass(slots=True)
class Told:
    """What the workers tell the scheduler after a step."""

    sent: list[str] = field(default_factory=list)  # as often as children say so
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)


class StandInWorkers:
    """One engine's worker halves of both connectors."""

    def __init__(self, store: StandInStore, load_async: bool) -> None:
        self._store, self._load_async = store, load_async
        self.offers: dict[str, list[Content]] = {}  # what prefill holds, by transfer id
        self.loads: list[tuple[str, str]] = []  # that were started: pull or load, request id
        self.reports: Counter[str] = Counter()  # of ended loads, by request id
        self._memory: dict[int, list[Content]] = {}
        self._by_hash: dict[bytes, tuple[Content, ...]] = {}
        self._transfers: list[_Transfer] = []
        self._ended: set[Life] = set()
        self._extra_saves: dict[str, int] = {}
        self._namespace: Namespace | None = None

    @property
    def under_way(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    def slots(self, block: int) -> list[Content]:
        """What a block holds."""
        return self._memory.setdefault(block, [_GARBAGE] * BLOCK)

    def learn(self, requests: Iterable[Any]) -> None:
        """What the blocks of these requests are to hold, by their hashes."""
        for request in requests:
            held = contents(request.all_token_ids)
            for position, found in enumerate(request.block_hashes):
                expected = tuple(held[position * BLOCK : (position + 1) * BLOCK])
                assert self._by_hash.setdefault(bytes(found), expected) == expected

    def step(self, metadata: Any, ending: Ending) -> Told:
        """Start what the connectors' scheduler halves ask for; end what is to end."""
        told = Told()
        self._extra_saves.update(getattr(metadata, "extra_async_saves", None) or {})
        for part in getattr(metadata, "metadata", (metadata,)):
            if isinstance(part, PoolStep):
                self._start_pool(part, told, ending.loads_fail)
            elif isinstance(part, StepMetadata):
                self._start_pulls(part, told, ending.still_read)
        return told

    def end(self, ending: Ending, told: Told) -> None:
        """After the forward: end transfers, and say which requests are done with."""
        for position, transfer in enumerate(list(self._transfers)):
            if position in ending.good or position in ending.bad:
                self._transfers.remove(transfer)
                self._end(transfer, position in ending.good, told)
        saving = {transfer.life for transfer in self._transfers if transfer.is_save}
        for life in sorted(self._ended - saving):
            self._ended.remove(life)
            told.sent.append(life.request_id)
        told.sent = [name for name in told.sent if not self._more_savers(name)]

    def forward(self, request: Any, blocks: Sequence[int], computed: int, scheduled: int,
                invalid: set[int]) -> int | None:  # fmt: skip
        """Compute tokens [computed, computed + scheduled); the next token, if it is known."""
        held = contents(request.all_token_ids)
        spoilt = not invalid.isdisjoint(blocks[: -(-computed // BLOCK)])
        for position in range(computed):
            found = self.slots(blocks[position // BLOCK])[position % BLOCK]
            assert spoilt or found == held[position], (
                f"request {request.request_id} reads {found} at {position}, block "
                f"{blocks[position // BLOCK]}; expected {held[position]}"
            )
        until = computed + scheduled
        for position in range(computed, until):
            content = _GARBAGE if spoilt else held[position]
            self.slots(blocks[position // BLOCK])[position % BLOCK] = content
        return next_token(held[until - 1]) if until == len(held) else None

    def _start_pool(self, step: PoolStep, told: Told, fail: bool) -> None:
        self._namespace = step.namespace or self._namespace
        told.invalid |= set(step.invalid)
        for life in step.preempted:  # the worker waits until nothing reads their blocks
            for save in [t for t in self._transfers if t.is_save and t.life == life]:
                self._transfers.remove(save)
                self._end(save, True, told)
        self._transfers += [_Transfer(job.request_id, job, True) for job in step.saves]
        self._ended |= set(step.ended)
        self.loads += [("load", job.request_id) for job in step.loads]
        for job in step.loads:
            if self._load_async:
                self._transfers.append(_Transfer(job.request_id, job))
            else:
                told.invalid |= self._load(job, not fail)

    def _start_pulls(self, step: StepMetadata, told: Told, still_read: bool) -> None:
        self.loads += [("pull", pull.request_id) for pull in step.pulls]
        self._transfers += [_Transfer(pull.request_id, pull) for pull in step.pulls]
        for pull in [t for t in self._transfers if isinstance(t.what, Pull)]:
            if pull.request_id in step.cancelled and not still_read:
                self._transfers.remove(pull)
                self._end(pull, False, told)
        told.sent += step.released

    def _end(self, transfer: _Transfer, well: bool, told: Told) -> None:
        if transfer.is_save:
            assert isinstance(transfer.what, BlockJob)
            self._save(transfer.what, well)
            return
        told.received.add(transfer.request_id)
        self.reports[transfer.request_id] += 1
        if isinstance(transfer.what, Pull):
            bad = self._pull(transfer.what, well)
        else:
            bad = self._load(transfer.what, well)
        told.invalid |= bad
        if bad:
            told.failed.add(transfer.request_id)

    def _save(self, job: BlockJob, well: bool) -> None:
        for block, found in zip(job.blocks, job.hashes, strict=True):
            held = tuple(self.slots(block))
            assert held == self._by_hash[found], (
                f"a save of {job.request_id} reads {held} in block {block}; expected "
                f"{self._by_hash[found]}"
            )
            for key in self._keys(found) if well else ():
                self._store[key] = held

    def _load(self, job: BlockJob, well: bool) -> set[int]:
        bad = set()
        for block, found in zip(job.blocks, job.hashes, strict=True):
            held = [self._store.get(key) for key in self._keys(found)]
            if well and held[0] is not None:
                self._memory[block] = list(held[0])
            else:
                self._memory[block] = [_GARBAGE] * BLOCK
                bad.add(block)
        return bad

    def _pull(self, pull: Pull, well: bool) -> set[int]:
        prefilled = self.offers[pull.params.kvpp.transfer_id]
        for there, here in zip(pull.remote_blocks, pull.local_blocks, strict=True):
            held = prefilled[there * BLOCK : (there + 1) * BLOCK]
            self._memory[here] = held + [_GARBAGE] * (BLOCK - len(held))
            if not well:
                self._memory[here] = [_GARBAGE] * BLOCK
        return set() if well else set(pull.local_blocks)

    def _keys(self, found: bytes) -> list[str]:
        assert self._namespace is not None
        return list(self._namespace.required_keys(found, layerwise=False))

    def _more_savers(self, name: str) -> bool:
        """Whether another child still saves: MultiConnector's own account."""
        left = self._extra_saves.get(name, 0)
        if left > 1:
            self._extra_saves[name] = left - 1
        elif left:
            del self._extra_saves[name]
        return left > 0
