"""Clients that send the same requests to a deployment over and over, and check the answers.

Some leave before their answer is complete. Each request has a `TrafficOutcome`; a failure counts as
an error unless a server was disturbed meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import aiohttp

from kvpp_connectors.demo.children import ChildFailed
from kvpp_connectors.demo.prompts import random_tokens
from kvpp_connectors.demo.workload import ask

__all__ = ["Question", "Traffic", "TrafficOutcome", "make_prompts"]

_LEAVING = 0.25  # share of requests whose client leaves
_LEAVES_S = 2.0  # after which those clients leave, at most
_SHARED, _LONGEST, _PREFIXES = 64, 200, 4  # tokens, tokens, count


class TrafficOutcome(StrEnum):
    """How a request ended."""

    RIGHT = "right"
    WRONG = "wrong"
    GIVEN_UP = "given up by the client"
    LOST = "lost with a server that was stopped"
    FAILED = "failed for no reason"
    LATE = "over its bound"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and a plain engine's answer to it."""

    prompt: list[int]
    answer: list[int]


def make_prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Prompts of random lengths; a third of them share one of four prefixes."""
    numbers = random.Random(7)
    tokens = partial(random_tokens, numbers, vocabulary=vocabulary)
    prefixes = [tokens(_SHARED) for _ in range(_PREFIXES)]
    return [
        [
            *(numbers.choice(prefixes) if numbers.random() < 1 / 3 else ()),
            *tokens(numbers.randint(8, _LONGEST)),
        ]
        for _ in range(count)
    ]


class Traffic:
    """Clients of one URL, each with one request at a time. For one event loop."""

    def __init__(self, url: str, questions: Sequence[Question], seed: int, bound_s: float) -> None:
        self._url, self._questions, self._bound_s = url, questions, bound_s
        self._seed, self._clients = seed, 0
        self._disturbances = 0
        self._calm, self._stopped = asyncio.Event(), asyncio.Event()
        self._calm.set()
        self._progress = asyncio.Condition()
        self.outcomes: Counter[TrafficOutcome] = Counter()
        self.complaints: list[str] = []  # about wrong, failed and late requests
        self.slowest_s = 0.0  # of complete answers

    async def run(self, clients: int) -> None:
        """Send requests until `stop`, then wait for running ones."""
        self._stopped.clear()
        limit = aiohttp.TCPConnector(limit=2 * clients)
        timeout = aiohttp.ClientTimeout(total=None)  # `_one` has its own
        async with (
            aiohttp.ClientSession(self._url, connector=limit, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(clients):
                self._clients += 1
                numbers = random.Random(f"{self._seed} {self._clients}")
                group.create_task(self._client(session, numbers))

    def stop(self) -> None:
        """Let every client finish its request and end."""
        self._stopped.set()

    @contextmanager
    def disturbed(self) -> Iterator[None]:
        """While a server is stopped or frozen: requests may be lost with it."""
        self._disturbances += 1
        self._calm.clear()
        try:
            yield
        finally:
            self._calm.set()

    async def wait_for_requests(self, requests: int) -> None:
        """Wait until so many more requests have ended."""
        goal = self.outcomes.total() + requests
        async with self._progress:
            await self._progress.wait_for(lambda: self.outcomes.total() >= goal)

    async def _client(self, session: aiohttp.ClientSession, numbers: random.Random) -> None:
        while not self._stopped.is_set():
            outcome = await self._one(session, numbers)
            async with self._progress:
                self.outcomes[outcome] += 1
                self._progress.notify_all()
            if outcome is TrafficOutcome.LOST:
                await self._calm.wait()

    async def _one(self, session: aiohttp.ClientSession, numbers: random.Random) -> TrafficOutcome:
        question = numbers.choice(self._questions)
        tokens = numbers.randint(1, len(question.answer))
        leaves = numbers.random() * _LEAVES_S if numbers.random() < _LEAVING else None
        disturbances, calm = self._disturbances, self._calm.is_set()
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._bound_s if leaves is None else leaves):
                answer = await ask(session, question.prompt, tokens)
        except TimeoutError:
            if leaves is not None:
                return TrafficOutcome.GIVEN_UP
            self.complaints.append(f"a request had no end after {self._bound_s:.0f} s")
            return TrafficOutcome.LATE
        except (ChildFailed, aiohttp.ClientError) as error:
            if not calm or disturbances != self._disturbances:
                return TrafficOutcome.LOST
            self.complaints.append(f"a request failed: {error}")
            return TrafficOutcome.FAILED
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        if answer.tokens == question.answer[:tokens]:
            return TrafficOutcome.RIGHT
        self.complaints.append(
            f"prompt {question.prompt[:8]}... of {len(question.prompt)} tokens: answer "
            f"{answer.tokens}, expected {question.answer[:tokens]}"
        )
        return TrafficOutcome.WRONG
