"""vLLM's own scheduler with our connectors' scheduler halves, over workers that move no bytes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from kvpp_connectors.p2p.heartbeat import Heartbeat
from kvpp_connectors.p2p.protocol import Confirm, Granted, Open, Release, Renew, WorkerAddress
from kvpp_connectors.p2p.transfer_params import (
    PARAMS_VERSION,
    TransferLease,
    TransferParams,
    make_params,
    read_params,
)
from kvpp_connectors.pool.lookup import Hit, Lookup, PendingLookup
from kvpp_connectors.pool.messages import PoolWorkerFacts
from tests.contract.launches import engine_config
from tests.safety.workers import (
    BLOCK,
    Ending,
    StandInStore,
    StandInWorkers,
    Told,
    contents,
    next_token,
)

__all__ = ["Kind", "Launch", "Site"]

PARTY = "decode/request"
OUTPUT = 48  # tokens of an answer, at most


@dataclass(frozen=True, slots=True)
class Kind:
    """Which connectors an engine has, in the order of a MultiConnector's children."""

    pd: str | None = None  # role of the P/D connector
    pool: bool = False
    pool_first: bool = False
    load_async: bool = False
    policy: str = "recompute"

    def transfer_config(self) -> Any:
        """The KVTransferConfig."""
        from vllm.config import KVTransferConfig

        pd = {"kv_connector": "MooncakeConnectorV2", "kv_role": self.pd, "kv_port": 0,
              "kv_connector_extra_config": {"model_id": "m"}}  # fmt: skip
        settings = {"master_server_address": "127.0.0.1:1", "global_segment_size": 0}
        extra = {"mooncake": settings, "load_async": self.load_async, "model_id": "m"}
        pool = {"kv_connector": "AscendStoreConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": extra}  # fmt: skip
        children = [pd] * bool(self.pd) + [pool] * self.pool
        if self.pool_first:
            children.reverse()
        top = children[0] if len(children) == 1 else {
            "kv_connector": "MultiConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": children},
        }  # fmt: skip
        return KVTransferConfig(**top, kv_load_failure_policy=self.policy)


class Launch:
    """What all engines of a kind have in common: it takes long to make."""

    def __init__(self, model: Path, kind: Kind) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.structured_output import StructuredOutputManager

        self.kind = kind
        self.config = engine_config(
            model, {}, tensor_parallel_size=1, max_num_seqs=8, async_scheduling=False,
            kv_transfer_config=kind.transfer_config(),
        )  # fmt: skip
        self.structured_outputs = StructuredOutputManager(self.config)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)


class StandInServer:
    """A lease endpoint that nobody reaches: the test hands its messages over."""

    def __init__(self, host: str, *_: object, **__: object) -> None:
        self.host, self.port = host, 1
        self.refused: Counter[str] = Counter()

    def close(self) -> None:
        """Nothing runs."""


class StandInLookup(Lookup):
    """Answers at once from the store, or not yet: ``later`` times."""

    def __init__(self, store: StandInStore) -> None:
        self._store = store
        self.later = 0

    def ask(
        self,
        request_id: str,
        known: PendingLookup | None,
        blocks: Sequence[Sequence[str]],
        wait_s: float = 0.0,
    ) -> PendingLookup:
        """The longest prefix in the store."""
        found = PendingLookup(tuple(tuple(keys) for keys in blocks), 0.0)
        if self.later:
            self.later -= 1
            return found
        hit = 0
        while hit < len(blocks) and all(key in self._store for key in blocks[hit]):
            hit += 1
        found.hit = Hit(hit)
        return found

    def forget(self, known: PendingLookup | None) -> None:
        """Nothing is remembered."""

    def close(self) -> None:
        """Nothing runs."""


class StandInHeartbeat(Heartbeat):
    """Carries nothing; knows whose lease is kept alive."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.not_reached = 0

    def add(self, request_id: str, params: TransferParams) -> None:
        """Until it is released or removed."""
        self.kept.add(request_id)

    def release(self, request_id: str, reason: str) -> None:
        """Its lease is not renewed any more."""
        self.kept.discard(request_id)

    def remove(self, request_id: str) -> None:
        """Its lease is not renewed any more."""
        self.kept.discard(request_id)

    def close(self) -> None:
        """Nothing runs."""


class Site:
    """One engine without a model. Methods are for one thread."""

    def __init__(self, launch: Launch, blocks: int) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        self.kind = kind = launch.kind
        self._hasher = launch.hasher
        self.store: StandInStore = {}
        launch.config.cache_config.num_gpu_blocks = blocks
        with (
            mock.patch("kvpp_connectors.pool.connector.ResilientStore"),
            mock.patch("kvpp_connectors.p2p.scheduler.ControlServer", StandInServer),
        ):
            self._scheduler: Any = Scheduler(
                launch.config, _kv_cache_config(blocks), launch.structured_outputs, BLOCK,
                hash_block_size=BLOCK, log_stats=True,
            )  # fmt: skip
        self.workers = StandInWorkers(self.store, kind.load_async)
        self.lookup, self.heartbeat = StandInLookup(self.store), StandInHeartbeat()
        self._pd: Any = None
        self._pool: Any = None
        self._describe()
        self._expected: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}  # why requests ended
        self.offers: dict[str, tuple[dict[str, Any], list[list[int]]]] = {}  # live leases
        self.granted: list[tuple[str, int]] = []  # leases, over or not: transfer id, generation
        self.steps = 0
        self.preempted: Counter[str] = Counter()  # how often, by request id
        self.all_blocks = self.free_blocks
        self.freed: Counter[str] = Counter()  # how often, by request id
        free = self._scheduler._free_blocks
        self._scheduler._free_blocks = lambda request: self._count_free(free, request)

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def live(self) -> list[str]:
        """Requests that have not ended for their client."""
        return [name for name in self._expected if name not in self.finished]

    def blocks_of(self, name: str) -> list[int]:
        """Blocks that a request holds; none if vLLM does not know it any more."""
        if name not in self._scheduler.requests:
            return []
        return list(self._scheduler.kv_cache_manager.get_block_ids(name)[0])

    def arrive(self, name: str, prompt: Sequence[int], tokens: int, remote: bool) -> None:
        """A request; ``remote``: with an offer at decode, for an offer at prefill."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params: dict[str, Any] | None = None
        if remote and self.kind.pd == "kv_producer":
            params, tokens = {"do_remote_decode": True}, 1
        elif remote and self.kind.pd == "kv_consumer":
            params = self._prefilled(name, prompt)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params},
        )
        self._expected[name] = _answer(prompt, tokens)
        self.answers[name] = []
        self._scheduler.add_request(
            Request(name, list(prompt), sampling, None, block_hasher=self._hasher)
        )

    def step(self, ending: Ending) -> None:
        """Schedule, compute, and end transfers as told; checks what every request reads."""
        self.steps += 1
        output = self._scheduler.schedule()
        self.preempted.update(output.preempted_req_ids or ())
        self.workers.learn(self._scheduler.requests.values())
        told = self.workers.step(output.kv_connector_metadata, ending)
        sampled: dict[str, list[int]] = {}
        computed = _computed(output)
        for name, scheduled in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[name]
            blocks = self._scheduler.kv_cache_manager.get_block_ids(name)[0]
            token = self.workers.forward(request, blocks, computed[name], scheduled, told.invalid)
            sampled[name] = [token] if token is not None else []
        self.workers.end(ending, told)
        self._take(self._scheduler.update_from_output(output, _runner_output(sampled, told)))
        self._check_offers()

    def step_with_failing_loads(self) -> None:
        """A step whose own loads fail."""
        self.step(Ending(loads_fail=True))

    def abort(self, name: str) -> None:
        """The client left."""
        from vllm.v1.request import RequestStatus

        self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.finished[name] = "abort"

    def save(self, prompt: Sequence[int], blocks: int) -> None:
        """Have the first blocks of a prompt in the pool, and nothing in a cache."""
        if blocks:
            self.arrive("saved", prompt[: blocks * BLOCK], 1, False)
            self.drain()
        assert self._scheduler.reset_prefix_cache()

    def lease(self, name: str, how: str) -> None:
        """An offer is read, released, or expires."""
        params, _ = self.offers.pop(name)
        key = read_params(params).lease(PARTY)
        if how == "read":
            self._pd._answer(Open(*key, 1))
            self._pd._answer(Confirm(*key, 0))
        elif how == "released":
            self._pd._answer(Release(*key, "test"))
        else:
            self._pd._book.expire(time.monotonic() + 1e9)
            self.offers.clear()

    def stray(self, chosen: int, what: str) -> None:
        """A message that comes again or too late, or names a lease that never was."""
        transfer, generation = self.granted[chosen % len(self.granted)]
        if transfer in self.offers:
            generation += 1
        key = transfer, generation, PARTY
        messages = {"open": Open(*key, 1), "confirm": Confirm(*key, 0), "renew": Renew(*key),
                    "release": Release(*key, "test")}  # fmt: skip
        assert not isinstance(self._pd._answer(messages[what]), Granted)

    def drain(self) -> None:
        """Everything ends well; nothing may be left."""
        self.lookup.later = 0
        for _ in range(100 + 200 * len(self._scheduler.requests)):
            for name in list(self.offers):
                self.lease(name, "released")
            if not self._scheduler.has_requests() and not self.workers.under_way:
                break
            self.step(Ending(good=frozenset(range(64))))
        assert not self._scheduler.requests, f"still held: {list(self._scheduler.requests)}"
        assert self.free_blocks == self.all_blocks
        assert not self.live
        assert self.freed == Counter(self._expected.keys())
        if self._pool is not None:
            assert not len(self._pool._requests)
        if self._pd is not None and self.kind.pd == "kv_consumer":
            assert not (self._pd._waiting or self._pd._pulling or self.heartbeat.kept)

    def close(self) -> None:
        """Stop the endpoints."""
        self._scheduler.shutdown()

    def _describe(self) -> None:
        """Replace what reaches for a network, and introduce the workers."""
        connector = self._scheduler.connector
        for child in getattr(connector, "_connectors", [connector]):
            if type(child).__name__ == "AscendStoreConnector":
                child._store.wait_at_start = lambda: None
                self._pool = child._scheduler
                self._pool._lookup.close()
                self._pool._lookup = self.lookup
                child.set_xfer_handshake_metadata_pp_aware(
                    {(0, 0): PoolWorkerFacts(("layer",), None)}
                )
            else:
                self._pd = child._prefill or child._decode
                if child._decode is not None:
                    child._decode._heartbeat.close()
                    child._decode._heartbeat = self.heartbeat
                else:
                    child._prefill._workers = [WorkerAddress("127.0.0.1", 1, "epoch")]

    def _count_free(self, free: Callable[[Any], None], request: Any) -> None:
        self.freed[request.request_id] += 1
        free(request)

    def _prefilled(self, name: str, prompt: Sequence[int]) -> dict[str, Any]:
        self.workers.offers[name] = contents(prompt)
        details = TransferLease(PARAMS_VERSION, name, 1, [WorkerAddress("127.0.0.1", 1, "epoch")])
        blocks = list(range(-(-len(prompt) // BLOCK)))
        offer = TransferParams("prefill", "127.0.0.1", 1, [blocks], len(prompt), BLOCK, details)
        return make_params(offer, name, 1, 1, 1)

    def _take(self, outputs: dict[int, Any]) -> None:
        for found in outputs.values():
            for output in found.outputs:
                name = output.request_id
                self.answers[name] += output.new_token_ids
                if output.finish_reason is None:
                    continue
                self.finished[name] = str(output.finish_reason)
                if self.finished[name] == "length":
                    assert self.answers[name] == self._expected[name], name
                else:
                    assert self.kind.policy == "fail", self.finished[name]
                if output.kv_transfer_params:
                    self._offered(name, output.kv_transfer_params)

    def _offered(self, name: str, params: dict[str, Any]) -> None:
        held = [list(self.workers.slots(block)) for block in params["remote_block_ids"][0]]
        self.offers[name] = params, held
        self.granted.append(read_params(params).lease(PARTY)[:2])

    def _check_offers(self) -> None:
        """A block on offer is nobody else's."""
        for name, (params, held) in self.offers.items():
            now = [self.workers.slots(block) for block in params["remote_block_ids"][0]]
            assert now == held, f"blocks of {name} have changed while decode may read them"


def _answer(prompt: Sequence[int], tokens: int) -> list[int]:
    known = list(prompt)
    for _ in range(tokens):
        known.append(next_token(contents(known)[-1]))
    return known[len(prompt) :]


def _computed(output: Any) -> dict[str, int]:
    """Tokens that each scheduled request has computed before."""
    new = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    return new | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def _runner_output(sampled: dict[str, list[int]], told: Told) -> Any:
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=list(sampled),
        req_id_to_index={name: index for index, name in enumerate(sampled)},
        sampled_token_ids=list(sampled.values()),
        kv_connector_output=KVConnectorOutput(
            finished_sending=set(told.sent),
            finished_recving=told.received,
            failed_recving=told.failed,
            invalid_block_ids=told.invalid,
        ),
    )


def _kv_cache_config(blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        MLAAttentionSpec,
    )

    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    return KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
