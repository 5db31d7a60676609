"""What breaks a pool while an engine with KVPP uses it: its master, its memory, its objects, and
requests that go away while their blocks are being saved.

After each fault every answer is what an engine without a pool gives, all blocks are free, nothing
is remembered, and a new prompt is saved and found again. The scheduler's thread is never held for
longer than the lookup's deadline, however long the store is silent. Field reports 2.5, 2.6, 4.1,
4.2, 4.3, 4.4, 4.5, 6.2 and 7.3.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine import tiny_models
from tests.engine.harness import Request, Script, kvpp_off, kvpp_on, random_tokens, start_engine
from tests.fork_server import call_apart
from tests.pool.master import Master, wait_until
from tests.pool.pool_engine import MTP, PoolEngine, transfer
from tests.pool.sharing import WAYS
from tests.pool.store_faults import EXTENSION, Gate
from tests.pool.store_process import StoreProcess
from tests.pool.stores import raw_mooncake

pytestmark = [pytest.mark.engine, pytest.mark.faults, pytest.mark.timeout(900)]

LENGTH, HIT = 100, 96  # tokens of a prompt, and what of it can be found
PROMPTS = [random_tokens(1000 + number, LENGTH) for number in range(120)]
TOKENS, LONG = 8, 40  # of an answer
BLOCKS = 40  # of the engine: five prompts at once
DEADLINE_S = 3.0  # of a lookup
BOUND_S = 120.0
ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "6000",  # beyond the deadline: a lookup in the step would show
    "MC_TCP_STATUS_TIMEOUT_SEC": "10",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "10",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse model with a draft layer."""
    folder = tmp_path_factory.mktemp("faults") / "model"
    return tiny_models.write(folder, replace(tiny_models.SHARED, drafts=1))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[Sequence[int], list[int]]:
    """What an engine without a pool answers to each prompt."""
    return dict(zip(PROMPTS, call_apart(_answers, model), strict=True))


def _answers(model: Path) -> list[list[int]]:
    script = Script(tuple(Request(prompt, max_tokens=LONG) for prompt in PROMPTS))
    with start_engine(model, kvpp_off(), tp=1, speculative_config=MTP) as engine:
        return [answer.tokens for answer in engine.run(script).answers]


@dataclass
class Site:
    """A pool and an engine that uses it."""

    model: Path
    way: dict[str, Any]
    expected: dict[Sequence[int], list[int]]
    master: Master
    store: StoreProcess
    engine: PoolEngine
    unused: Iterator[Sequence[int]]

    def prompts(self, count: int) -> list[Sequence[int]]:
        """Prompts that no engine of this site has seen."""
        return list(itertools.islice(self.unused, count))

    def served(self, *prompts: Sequence[int]) -> int:
        """Run prompts that come together: right answers; tokens that were not computed."""
        return self.checked(prompts, self.engine.run(prompts, TOKENS))

    def checked(self, prompts: Sequence[Sequence[int]], answers: list[dict[str, Any]]) -> int:
        """Compare answers; tokens that were not computed."""
        for prompt, answer in zip(prompts, answers, strict=True):
            count = len(answer["tokens"])
            assert (answer["tokens"], count >= TOKENS) == (self.expected[prompt][:count], True)
        return sum(answer["cached"] for answer in answers)

    def saved(self) -> Sequence[int]:
        """A new prompt that the pool has."""
        [prompt] = self.prompts(1)
        self.wait_found(prompt)
        return prompt

    def wait_found(self, prompt: Sequence[int]) -> None:
        """Serve a prompt until it is found. The master may yet give new objects to dead memory."""
        wait_until(lambda: self.served(prompt) == HIT, BOUND_S, "a prompt that is found again")

    def replace_store(self, size: str) -> None:
        """Kill the process that lends its memory; another lends its own."""
        self.store.stop()
        self.store = StoreProcess(self.master, size)

    @contextlib.contextmanager
    def held(self, folder: Path, operation: str, keys: str = "") -> Iterator[Gate]:
        """Meanwhile every worker's get or put with such a key stands before a gate."""
        gate = Gate(folder)
        self.engine.call_all("fault_hold_store", folder, operation, keys)
        try:
            yield gate
        finally:
            gate.open()
            self.engine.call_all("fault_release_store")

    def served_meanwhile(
        self, prompt: Sequence[int], gate: Gate, fault: Callable[[], object]
    ) -> None:
        """Run a prompt; do something once its load stands before the gate."""
        self.engine.ask("reset")
        self.engine.tell("run", prompts=[prompt], max_tokens=TOKENS)
        wait_until(gate.is_reached, BOUND_S, "a load")
        fault()
        gate.open()
        self.checked([prompt], self.engine.answer(BOUND_S))


@pytest.fixture(scope="module", params=WAYS)
def started(
    model: Path,
    expected: dict[Sequence[int], list[int]],
    request: pytest.FixtureRequest,
) -> Iterator[Site]:
    """Two ranks with KVPP, few blocks, leases of 200 ms."""
    way = WAYS[request.param]
    master = Master(["--default_kv_lease_ttl=200"])
    store = StoreProcess(master, "64MB")
    engine = start(model, model.parent / f"{request.param}.log", master, way)
    site = Site(model, way, expected, master, store, engine, iter(PROMPTS))
    try:
        engine.wait_ready()
        yield site
    finally:
        engine.stop()
        site.store.stop()
        master.stop()


def start(model: Path, log: Path, master: Master, way: dict[str, Any]) -> PoolEngine:
    """An engine that waits 5 ms for a lookup, and ``DEADLINE_S`` in all."""
    return PoolEngine(
        model,
        log,
        environment=ENVIRONMENT,
        additional_config=kvpp_on(),
        blocks=BLOCKS,
        speculative_config=MTP,
        worker_extension_cls=EXTENSION,
        kv_transfer_config=transfer(
            master.address, lookup_deadline_s=DEADLINE_S, lookup_wait_s=0.005, **way
        ),
    )


@pytest.fixture
def site(started: Site, capsys: pytest.CaptureFixture[str]) -> Iterator[Site]:
    """In the end all blocks are back, and the pool is used as before."""
    free = started.engine.ask("settle")
    yield started
    assert started.engine.ask("settle") == free

    started.saved()
    assert started.engine.ask("settle") == free
    longest = started.engine.ask("longest_lookup")
    with capsys.disabled():
        print(f" lookups held the scheduler for {longest * 1e3:.1f} ms at most ", end="")
    assert longest < DEADLINE_S


class TestMaster:
    """mooncake_master."""

    def test_killed_and_restarted_empty(self, site: Site) -> None:
        """4.4, 4.5: nothing is found then, and everything saved anew."""
        prompt = site.saved()
        site.master.kill()
        assert site.served(prompt, *site.prompts(3)) == 0
        site.master.start()

    def test_stuck(self, site: Site) -> None:
        """4.4, 6.2: it goes on later with all that it knew."""
        prompt = site.saved()
        site.master.signal(signal.SIGSTOP)
        try:
            assert site.served(prompt, *site.prompts(3)) == 0
        finally:
            site.master.signal(signal.SIGCONT)

    def test_killed_between_lookup_and_load(self, site: Site, tmp_path: Path) -> None:
        """4.1: the load fails on every rank, and the blocks are computed."""
        prompt = site.saved()
        with site.held(tmp_path, "get") as gate:
            site.served_meanwhile(prompt, gate, site.master.kill)
        site.master.start()


class TestMemory:
    """The process that lends its memory to the pool."""

    def test_killed(self, site: Site) -> None:
        """4.2, 4.4: the master lists what it held for a while."""
        prompt = site.saved()
        site.replace_store("64MB")
        site.served(prompt, *site.prompts(3))

    def test_killed_between_lookup_and_load(self, site: Site, tmp_path: Path) -> None:
        prompt = site.saved()
        with site.held(tmp_path, "get") as gate:
            site.served_meanwhile(prompt, gate, lambda: site.replace_store("64MB"))

    def test_a_pool_of_16_mib_under_load(self, site: Site) -> None:
        """4.3: three times what it holds, and leases of 200 ms."""
        site.replace_store("16MB")
        prompts = site.prompts(24)
        for _ in range(2):
            for start_at in range(0, len(prompts), 6):
                site.served(*prompts[start_at : start_at + 6])
        site.replace_store("64MB")


class TestObjects:
    """4.1: objects change between the lookup and the load, as by eviction or a careless hand."""

    @pytest.mark.parametrize("change", ["deleted", "truncated", "of another key"])
    def test_changed(self, site: Site, tmp_path: Path, change: str) -> None:
        """One shard of the third block; the blocks before and behind it are there."""
        prompt = site.saved()
        before, key = (keys[1].replace("@done", "@t4") for keys in site.engine.ask("keys")[1:3])
        raw = raw_mooncake(site.master.address)
        data = fetched(raw, before)

        def fault() -> None:
            assert raw.remove(key, True) == 0
            if change == "truncated":
                assert raw.put(key, data[: len(data) // 2]) == 0
            elif change == "of another key":
                assert raw.put(key, data) == 0

        try:
            with site.held(tmp_path, "get") as gate:
                site.served_meanwhile(prompt, gate, fault)
            site.served(prompt)
        finally:
            raw.close()


def fetched(raw: Any, key: str) -> bytes:
    """The bytes of an object; its lease is short, and a first transfer slow."""
    found = b""

    def fetch() -> bool:
        nonlocal found
        found = raw.get(key)
        return bool(found)

    wait_until(fetch, BOUND_S, f"the bytes of {key}")
    return found


class TestSaves:
    """2.5, 2.6: saves are pending."""

    def test_two_engines_save_one_prefix_at_once(self, site: Site) -> None:
        log = site.model.parent / "other.log"
        other = start(site.model, log, site.master, site.way).wait_ready()
        prompts = site.prompts(4)
        try:
            site.engine.ask("reset")
            for engine in (site.engine, other):
                engine.tell("run", prompts=prompts, max_tokens=TOKENS)
            for engine in (site.engine, other):
                site.checked(prompts, engine.answer(BOUND_S))
            assert site.served(*prompts) == 4 * HIT
        finally:
            other.stop()

    def test_preemption(self, site: Site, tmp_path: Path) -> None:
        """More requests than blocks, and answers that grow beyond them, while nothing is put."""
        prompts, preempted = site.prompts(5), Gate(tmp_path / "preempted")
        preempted.folder.mkdir()
        site.engine.ask("reset")
        site.engine.ask("watch_preemptions", folder=preempted.folder)
        with site.held(tmp_path, "put") as gate:
            site.engine.tell("run", prompts=prompts, max_tokens=LONG)
            wait_until(gate.is_reached, BOUND_S, "a save")
            wait_until(lambda: bool(preempted.of(-1)), BOUND_S, "a preemption")
            gate.open()
            site.checked(prompts, site.engine.answer(BOUND_S))
        site.served(*prompts)

    def test_abort(self, site: Site, tmp_path: Path) -> None:
        """The blocks of aborted requests stay until their saves have ended, and then are free."""
        prompts = site.prompts(4)

        def saving() -> bool:
            site.engine.ask("step")
            return gate.is_reached()

        site.engine.ask("reset")
        with site.held(tmp_path, "put") as gate:
            names = [site.engine.ask("add", prompt=list(p), max_tokens=LONG) for p in prompts]
            wait_until(saving, BOUND_S, "a save")
            for name in names:
                site.engine.ask("abort", name=name)
            site.engine.ask("step")
            assert site.engine.ask("blocks")["requests"] > 0
            gate.open()
            site.engine.ask("settle")
        site.served(*prompts)
