"""Random interleavings of requests, transfers and faults through one engine's schedulers."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.safety.site import OUTPUT, Launch, Site
from tests.safety.workers import BLOCK, Ending

__all__ = ["Requests"]

some = st.frozensets(st.integers(0, 4), max_size=3)


class Requests(RuleBasedStateMachine):
    """Arrive, compute, load, save, pull, fail, preempt, abort, expire, in any order.

    Blocks are few, so that requests preempt each other. After each step: what a request reads is
    its own, what is saved is what its name says, what is on offer stays. In the end: every answer
    right, no block held, nothing remembered.
    """

    launch: ClassVar[Launch]
    steps_done: ClassVar[int] = 0  # of all examples

    @initialize(blocks=st.integers(10, 20))
    def start(self, blocks: int) -> None:
        """An engine with few blocks; one of them is vLLM's own."""
        self.site = Site(self.launch, blocks)
        self.longest = (blocks - 2) * BLOCK - OUTPUT
        self.count = 0

    @precondition(lambda self: len(self.site.live) < 10)
    @rule(
        prefix=st.integers(0, 1),
        shared=st.integers(0, 5 * BLOCK),
        own=st.integers(1, 3 * BLOCK),
        tokens=st.integers(1, OUTPUT),
        remote=st.booleans(),
    )
    def arrive(self, prefix: int, shared: int, own: int, tokens: int, remote: bool) -> None:
        """A prompt that may begin like others."""
        prompt = [*range(prefix, prefix + shared), *[100 + self.count] * own][: self.longest]
        self.site.arrive(f"r{self.count}", prompt, tokens, remote)
        self.count += 1

    @rule(good=some, bad=some, loads_fail=st.booleans(), still_read=st.booleans())
    def step(
        self, good: frozenset[int], bad: frozenset[int], loads_fail: bool, still_read: bool
    ) -> None:
        """The engine's next step."""
        self.site.step(Ending(good, bad - good, loads_fail, still_read))

    @rule(steps=st.integers(2, 20), end=st.booleans())
    def steps(self, steps: int, end: bool) -> None:
        """Steps in which every transfer ends well, or none ends at all."""
        for _ in range(steps):
            self.site.step(Ending(good=frozenset(range(8 if end else 0))))

    @precondition(lambda self: self.site.live)
    @rule(chosen=st.integers(0, 7))
    def abort(self, chosen: int) -> None:
        """A client leaves."""
        self.site.abort(self.site.live[chosen % len(self.site.live)])

    @rule(times=st.integers(1, 4))
    def answer_later(self, times: int) -> None:
        """The pool does not know yet."""
        self.site.lookup.later = times

    @precondition(lambda self: self.site.store)
    @rule(chosen=st.integers(0, 50))
    def evict(self, chosen: int) -> None:
        """An object goes, maybe between lookup and load."""
        keys = list(self.site.store)
        del self.site.store[keys[chosen % len(keys)]]

    @precondition(lambda self: self.site.offers)
    @rule(chosen=st.integers(0, 7), how=st.sampled_from(["read", "released", "expired"]))
    def end_lease(self, chosen: int, how: str) -> None:
        """Decode is done with an offer, or gone."""
        offers = list(self.site.offers)
        self.site.lease(offers[chosen % len(offers)], how)

    @precondition(lambda self: self.site.granted)
    @rule(chosen=st.integers(0, 7), what=st.sampled_from(["open", "confirm", "renew", "release"]))
    def stray(self, chosen: int, what: str) -> None:
        """A message about a lease that is over or never was changes nothing."""
        self.site.stray(chosen, what)

    def teardown(self) -> None:
        """Whatever happened: it ends well."""
        if hasattr(self, "site"):
            self.site.drain()
            type(self).steps_done += self.site.steps
            self.site.close()
