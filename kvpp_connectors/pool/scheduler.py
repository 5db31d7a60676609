"""The half of AscendStoreConnector beside vLLM's scheduler: what is loaded and what is saved.

It never waits for the store: lookups run on a thread of their own and have a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from kvpp_connectors.log import get_logger
from kvpp_connectors.pool.facts import PoolFacts
from kvpp_connectors.pool.invalid_blocks import InvalidBlocks
from kvpp_connectors.pool.keys import Namespace
from kvpp_connectors.pool.lookup import Lookup
from kvpp_connectors.pool.messages import BlockJob, Life, PoolStep
from kvpp_connectors.pool.requests import RequestState, RequestTable
from kvpp_connectors.vllm_api.scheduler_output import read_step

__all__ = ["PoolScheduler"]

logger = get_logger(__name__)


class PoolScheduler:
    """One engine's requests. Methods are for the scheduler's thread."""

    def __init__(self, facts: PoolFacts, lookup: Lookup) -> None:
        self._facts = facts
        self._lookup = lookup
        self._namespace: Namespace | None = None
        self._requests = RequestTable()
        self._invalid = InvalidBlocks(facts.block_size)
        self._loads: list[BlockJob] = []
        self._saves: list[BlockJob] = []
        self._ended: list[Life] = []
        self._step = 0
        self._lookup_wait_s = facts.options.lookup_wait_s  # left in this step, for all its lookups

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
        state = self._admit(request)
        state.local_tokens = computed
        keys = [] if state.load_tried else self._keys_beyond(request, computed)
        if not keys:
            return 0
        began = time.monotonic()
        state.lookup = self._lookup.ask(request.request_id, state.lookup, keys, self._lookup_wait_s)
        self._lookup_wait_s = max(0.0, self._lookup_wait_s - (time.monotonic() - began))
        if (hit := state.lookup.hit) is None:
            return None
        first = computed // self._facts.block_size
        there = (first + hit.blocks) * self._facts.block_size
        # The last token is computed in any case: its output is what the request is for.
        tokens: int = max(0, min(there, request.num_tokens - 1) - computed)
        return tokens

    def allocated(self, request: Any, block_ids: Sequence[int], tokens: int) -> None:
        """Blocks are there; ``tokens`` tokens of them are to come from the pool."""
        state = self._admit(request)
        if state.local_tokens is None:
            return  # the blocks beyond an asynchronous load
        self._invalid.allocated(block_ids[state.local_tokens // self._facts.block_size :])
        if tokens:
            self._lookup.forget(state.lookup)
            state.lookup = None
            self._loads.append(state.start_load(block_ids, tokens, self._facts.block_size))
        state.local_tokens = None

    def build_step(self, output: Any) -> PoolStep:
        """What the workers do in the step that ``output``, a SchedulerOutput, describes."""
        step = PoolStep(namespace=self._namespace)
        for name in output.preempted_req_ids or ():
            if (life := self._requests.preempt(name)) is not None:
                step.preempted.append(life)
        self._follow(output)
        if self._saving:
            self._saves += self._due()
        self._step += 1
        self._lookup_wait_s = self._facts.options.lookup_wait_s
        step.invalid = self._invalid.reported()
        step.loads, self._loads = self._loads, []
        step.saves, self._saves = self._saves, []
        step.ended, self._ended = self._ended, []
        return step

    def finished(self, request: Any, ended_well: bool) -> bool:
        """A request is over; whether its blocks must stay until the workers name it."""
        state = self._requests.remove(request.request_id)
        if state is None:
            return False
        self._lookup.forget(state.lookup)
        if ended_well and self._saving:
            filled = self._fillable(request, request.num_computed_tokens)
            rest = state.take_rest(filled, self._invalid.valid)
            self._saves += [rest] if rest is not None else []
        if state.holds:
            self._ended.append(state.life)
        return state.holds

    def failed(self, blocks: Collection[int]) -> None:
        """Loads of these blocks failed, ours or another child's."""
        self._invalid.failed(blocks, (state.blocks for state in self._requests))

    def close(self) -> None:
        """End the lookups."""
        self._lookup.close()

    @property
    def _saving(self) -> bool:
        return self._facts.saves and self._namespace is not None

    @property
    def _ended_step(self) -> int:
        """The last step whose result is known."""
        return self._step - self._facts.lag

    def _admit(self, request: Any) -> RequestState:
        known = self._requests.get(request.request_id)
        state = self._requests.admit(request)
        if known is not None and known is not state:
            self._lookup.forget(known.lookup)
        return state

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
        self._invalid.begin_step(self._ended_step)
        for scheduled in read_step(output).requests:
            state = self._requests.get(scheduled.request_id)
            if state is None:
                continue
            state.take_blocks(scheduled)
            computed, new = scheduled.computed_tokens, scheduled.new_tokens
            self._invalid.check(self._step, state.blocks, computed, new)
            if self._saving:
                filled = self._fillable(state.request, computed)
                prompt = min(computed + new, state.request.num_prompt_tokens)
                state.scheduled(self._step, filled, max(filled, prompt // self._facts.block_size))

    def _due(self) -> list[BlockJob]:
        found = []
        for state in self._requests:
            computed = state.request.num_computed_tokens // self._facts.block_size
            job = state.take_due(self._ended_step, computed, self._invalid.valid)
            found += [job] if job is not None else []
        return found

    def _fillable(self, request: Any, computed: int) -> int:
        """Blocks that ``computed`` tokens fill and that are to be saved.

        Tokens of a step beyond the prompt may be drafts: they count when a later step counts them.
        """
        if not self._facts.options.save_decode_cache:
            computed = min(computed, request.num_prompt_tokens)
        return computed // self._facts.block_size
