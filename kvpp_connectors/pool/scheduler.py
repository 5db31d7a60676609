"""The half of AscendStoreConnector beside vLLM's scheduler: what is loaded and what is saved.

It never waits for the store: lookups run on a thread of their own and have a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvpp_connectors.log import get_logger
from kvpp_connectors.pool.facts import PoolFacts
from kvpp_connectors.pool.invalid_blocks import SpoiltBlocks
from kvpp_connectors.pool.keys import Namespace
from kvpp_connectors.pool.lookup import Lookup
from kvpp_connectors.pool.messages import BlockJob, PoolStep
from kvpp_connectors.pool.requests import Tracked

__all__ = ["PoolScheduler"]

logger = get_logger(__name__)


class PoolScheduler:
    """One engine's requests. Methods are for the scheduler's thread."""

    def __init__(self, facts: PoolFacts, lookup: Lookup) -> None:
        self._facts = facts
        self._lookup = lookup
        self._namespace: Namespace | None = None
        self._found: dict[str, int] = {}  # tokens that were there locally when the pool was asked
        self._tried: set[str] = set()  # requests with a load: one that failed would fail again
        self._requests: dict[str, Any] = {}  # vLLM's requests that have blocks and are not over
        self._tracked: dict[str, Tracked] = {}
        self._spoilt = SpoiltBlocks(facts.block_size)
        self._local: dict[str, int] = {}  # tokens that a waiting request has locally
        self._loads: list[BlockJob] = []
        self._saves: list[BlockJob] = []
        self._ended: list[str] = []
        self._step = 0
        self._patience = facts.options.lookup_wait_s  # left in this step, for all its lookups

    def use(self, namespace: Namespace) -> None:
        """The names of this engine's objects are known."""
        self._namespace = namespace
        logger.info(
            "pool objects are named %s@..., each block in %d shards",
            namespace.prefix,
            len(namespace.topology.shards),
        )

    def external_tokens(self, request: Any, computed: int) -> int | None:
        """Tokens beyond ``computed`` that the pool has; None: not known yet."""
        self._local[request.request_id] = computed
        if request.request_id in self._tried:
            return 0
        keys = self._keys_beyond(request, computed)
        if not keys:
            return 0
        began = time.monotonic()
        hit = self._lookup.ask(request.request_id, keys, self._patience)
        self._patience = max(0.0, self._patience - (time.monotonic() - began))
        if hit is None:
            return None
        first = computed // self._facts.block_size
        there = (first + hit.blocks) * self._facts.block_size
        # The last token is computed in any case: its output is what the request is for.
        tokens: int = max(0, min(there, request.num_tokens - 1) - computed)
        self._found[request.request_id] = computed
        return tokens

    def allocated(self, request: Any, block_ids: Sequence[int], tokens: int) -> None:
        """Blocks are there; ``tokens`` tokens of them are to come from the pool."""
        name = request.request_id
        self._requests[name] = request
        if (local := self._local.pop(name, None)) is not None:
            self._spoilt.taken(block_ids[local // self._facts.block_size :])
        computed = self._found.pop(name, None)
        if computed is None or not tokens:
            return
        self._lookup.forget(name)
        self._tried.add(name)
        span = slice(
            computed // self._facts.block_size, -(-(computed + tokens) // self._facts.block_size)
        )
        hashes = tuple(bytes(found) for found in request.block_hashes[span])
        self._loads.append(BlockJob(name, tuple(block_ids[span]), hashes))

    def build_step(self, output: Any) -> PoolStep:
        """What the workers do in the step that ``output``, a SchedulerOutput, describes."""
        step = PoolStep(namespace=self._namespace)
        if self._facts.saves and self._namespace is not None:
            for name in output.preempted_req_ids or ():
                self._tried.discard(name)
                if name in self._tracked:
                    self._tracked[name].preempted()
                    step.preempted.append(name)
            self._follow(output)
            self._saves += self._due()
        step.spoilt = self._spoilt.read_in(output)
        self._step += 1
        self._patience = self._facts.options.lookup_wait_s
        step.loads, self._loads = self._loads, []
        step.saves, self._saves = self._saves, []
        step.ended, self._ended = self._ended, []
        return step

    def finished(self, request: Any, ended_well: bool) -> bool:
        """A request is over; whether its blocks must stay until the workers name it."""
        name = request.request_id
        self._lookup.forget(name)
        self._spoilt.forget(name)
        self._found.pop(name, None)
        self._local.pop(name, None)
        self._tried.discard(name)
        self._requests.pop(name, None)
        tracked = self._tracked.pop(name, None)
        if tracked is None:
            return False
        if ended_well:
            rest = tracked.take_rest(self._fillable(request, request.num_computed_tokens))
            self._saves += [rest] if rest is not None else []
        if tracked.holds:
            self._ended.append(name)
        return tracked.holds

    def failed(self, blocks: Collection[int]) -> None:
        """Loads of these blocks failed, ours or another child's."""
        self._spoilt.failed(blocks)

    def close(self) -> None:
        """End the lookups."""
        self._lookup.close()

    def _keys_beyond(self, request: Any, computed: int) -> list[tuple[str, ...]]:
        if not self._facts.loads or self._namespace is None:
            return []
        first = computed // self._facts.block_size
        layerwise = self._facts.options.use_layerwise
        return [
            self._namespace.required_keys(bytes(found), layerwise)
            for found in request.block_hashes[first : request.num_tokens // self._facts.block_size]
        ]

    def _follow(self, output: Any) -> None:
        """Learn the blocks and tokens of this step's requests."""
        scheduled: Mapping[str, int] = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            request = self._requests.get(new.req_id)
            if request is not None:
                self._tracked[new.req_id] = Tracked(
                    new.req_id, request.block_hashes, list(new.block_ids[0]),
                    done=new.num_computed_tokens // self._facts.block_size,
                )  # fmt: skip
                self._fill(request, new.num_computed_tokens, scheduled[new.req_id])
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            request, tracked = self._requests.get(name), self._tracked.get(name)
            if request is None or tracked is None:
                continue
            blocks = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                tracked.blocks = []
                tracked.done = cached.num_computed_tokens[index] // self._facts.block_size
            tracked.blocks += blocks[0] if blocks else []
            self._fill(request, cached.num_computed_tokens[index], scheduled[name])

    def _due(self) -> list[BlockJob]:
        size, found = self._facts.block_size, []
        for name, tracked in self._tracked.items():
            computed = self._requests[name].num_computed_tokens // size
            job = tracked.take_due(self._step, self._facts.lag, computed)
            found += [job] if job is not None else []
        return found

    def _fill(self, request: Any, computed: int, scheduled: int) -> None:
        before = self._fillable(request, computed)
        prompt = min(computed + scheduled, request.num_prompt_tokens) // self._facts.block_size
        self._tracked[request.request_id].scheduled(self._step, before, max(before, prompt))

    def _fillable(self, request: Any, computed: int) -> int:
        """Blocks that ``computed`` tokens fill and that are to be saved.

        Tokens of a step beyond the prompt may be drafts: they count when a later step counts them.
        """
        if not self._facts.options.save_decode_cache:
            computed = min(computed, request.num_prompt_tokens)
        return computed // self._facts.block_size
