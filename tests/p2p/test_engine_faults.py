"""Faults of engines in processes of their own: killed, stopped, cut off, held up, asked twice.

Prefill: two ranks with KVPP and few blocks; decode: one rank. After each fault every request has
ended within its bound, all blocks are free on the survivors, and the next request is pulled and
answered like a computed one. Field reports 2.1, 2.2, 2.3, 2.6, 2.7 and 8.2; 4.2 for decode: what
was read in vain is never taken for the prompt's KV.
6.1: no pull holds its blocks beyond its bound.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.engine import tiny_models
from tests.engine.harness import random_tokens
from tests.p2p.engine_pair import PREFILL, TOKENS, Pair
from tests.p2p.relay import Detour
from tests.p2p.sides import eventually

pytestmark = [pytest.mark.engine, pytest.mark.faults, pytest.mark.timeout(900)]

BOUND = 45.0  # seconds, of every request
PULLED = 2 * TOKENS  # scheduled tokens of an answer whose prompt was pulled: drafts count too
READ_TIMEOUT = 12  # seconds, of decode's transfer engine
WINDOW = 4  # reads at once; on two connections they end by two timeouts
BLOCKS = 36  # prefill's, just enough for its longest prompt
LONGEST = 500  # tokens

SEEDS = itertools.count(100)


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, ports: Callable[[int], Sequence[int]]
) -> Iterator[dict[str, Pair]]:
    """A prefill engine, and a decode engine for each kv_load_failure_policy."""
    folder = tmp_path_factory.mktemp("faults")
    model = tiny_models.write(folder / "model", replace(tiny_models.SHARED, drafts=1))
    names = ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC")
    timeouts = {name: str(READ_TIMEOUT) for name in names}
    port, _, decode, failing_decode = ports(4)
    pair = Pair(folder, model, port, decode, {"blocks": BLOCKS}, timeouts, {"window": WINDOW})
    failing = replace(pair, policy="fail", decode_port=failing_decode)
    try:
        pair.start_prefill()
        pair.start_decode()
        failing.start_decode()
        for engine in (pair.prefill, pair.decode, failing.decode):
            engine.wait_ready()
        failing.prefill = pair.prefill
        for each in (pair, failing):  # transfer engines have met
            prompt = new_prompt()
            assert each.decoded(prompt, each.prefilled(prompt))["scheduled"] <= PULLED
        yield {"recompute": pair, "fail": failing}
    finally:
        pair.stop()
        failing.stop()


@pytest.fixture
def pair(engines: dict[str, Pair]) -> Iterator[Pair]:
    """Engines that recompute; in the end everything is as it was."""
    with mended(engines["recompute"]) as pair:
        yield pair


@pytest.fixture(params=["recompute", "fail"])
def policy_pair(engines: dict[str, Pair], request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Engines that recompute, and engines that fail; in the end everything is as it was."""
    pair = engines[request.param]
    pair.prefill = engines["recompute"].prefill
    break_in(pair)  # with a prefill engine that another test may have started
    with mended(pair):
        yield pair


@contextlib.contextmanager
def mended(pair: Pair) -> Iterator[Pair]:
    """After the block all blocks are back, and the next request is pulled and right."""
    free = pair.settled()
    try:
        yield pair
    finally:
        pair.decode.call("fault_let_go")
    assert pair.settled() == free
    prompt = new_prompt()
    expected = pair.expected(prompt)
    assert_pulled(pair.decoded(prompt, pair.prefilled(prompt)), expected)
    assert pair.settled() == free


def new_prompt(length: int = 100) -> list[int]:
    """A prompt that no engine has seen."""
    return list(random_tokens(next(SEEDS), length))


def assert_pulled(answer: dict[str, Any], expected: list[int]) -> None:
    """It is right, and nothing of the prompt was computed at decode."""
    assert answer["tokens"] == expected
    assert answer["scheduled"] <= PULLED


def assert_not_pulled(
    pair: Pair, answer: dict[str, Any], prompt: list[int], expected: list[int]
) -> None:
    """It was computed, or has ended with an explicit error, as the policy says."""
    if pair.policy == "fail":
        assert (answer["finish"], answer["tokens"]) == ("error", [])
    else:
        assert answer["tokens"] == expected
        assert answer["scheduled"] >= len(prompt)


@contextlib.contextmanager
def told(pair: Pair, text: str) -> Iterator[None]:
    """Decode's log says so meanwhile, and names the engine that it wanted to read from."""
    known = len(pair.decode.log())
    yield
    [line] = [s for s in pair.decode.log()[known:].splitlines() if "its KV did not come" in s]
    assert text in line
    assert "from engine " in line and "(transfer request-" in line


@contextlib.contextmanager
def counted(pair: Pair, name: str) -> Iterator[None]:
    """One lease more ends so meanwhile, and none otherwise."""
    before = pair.prefill.ask("counts")
    yield
    after = pair.prefill.ask("counts")
    ended = ("leases_read", "leases_released", "leases_expired")
    assert {key: after[key] - before[key] for key in ended} == {key: key == name for key in ended}


def in_flight_from_stopped_prefill(pair: Pair, prompt: list[int], params: dict[str, Any]) -> str:
    """Some reads are done, others are under way and prefill stands still; the request's id."""
    name = pair.held("read", prompt, params)
    pair.prefill.signal(signal.SIGSTOP)
    pair.decode.call("fault_let_go")
    eventually(lambda: pair.decode.call("observe_in_flight"))
    return name


@contextlib.contextmanager
def prefill_replaced(pair: Pair) -> Iterator[None]:
    """After the block prefill is a new engine at the same ports."""
    try:
        yield
    finally:
        pair.prefill.stop()
        pair.start_prefill()
        pair.prefill.wait_ready()


@contextlib.contextmanager
def decode_replaced(pair: Pair) -> Iterator[None]:
    """After the block decode is a new engine."""
    try:
        yield
    finally:
        pair.decode.stop()
        pair.start_decode()
        pair.decode.wait_ready()


def break_in(pair: Pair) -> None:
    """2.7: the first request may meet a connection that broke, and fails once; see `mended`.

    Afterwards the transfer engines have met: a first connection to a peer that stands still is
    Mooncake's to give up, after 61 s.
    """
    prompt = new_prompt()
    expected = pair.expected(prompt)
    answer = pair.decoded(prompt, pair.prefilled(prompt))
    if answer["scheduled"] > PULLED or answer["finish"] == "error":
        assert_not_pulled(pair, answer, prompt, expected)
    else:
        assert_pulled(answer, expected)


class TestPrefill:
    """Prefill is killed or stands still."""

    @pytest.mark.parametrize("moment", ["reads in flight", "before the confirmation"])
    def test_killed_during_the_pull(self, pair: Pair, moment: str) -> None:
        """2.1, 2.7: decode computes; a new engine at the same ports is met anew."""
        prompt = new_prompt()
        expected = pair.expected(prompt)
        params = pair.prefilled(prompt)
        with prefill_replaced(pair):
            if moment == "reads in flight":
                name = in_flight_from_stopped_prefill(pair, prompt, params)
                pair.prefill.signal(signal.SIGKILL)
            else:
                name = pair.held("confirm", prompt, params)
                pair.prefill.signal(signal.SIGKILL)
                pair.decode.call("fault_let_go")
            assert_not_pulled(pair, pair.finished(name, BOUND), prompt, expected)

    def test_killed_after_the_pull(self, pair: Pair) -> None:
        """2.1: the request that was pulled does not notice."""
        prompt = new_prompt()
        expected = pair.expected(prompt)
        name = pair.started(prompt, pair.prefilled(prompt))
        pair.decode.ask("step_until_running", BOUND)
        with prefill_replaced(pair):
            pair.prefill.signal(signal.SIGKILL)
            assert_pulled(pair.finished(name, BOUND), expected)

    def test_stopped_with_reads_in_flight(self, policy_pair: Pair) -> None:
        """2.1: decode gives up in its time; what prefill sends when it goes on goes nowhere."""
        pair, prompt = policy_pair, new_prompt()
        expected = pair.expected(prompt)
        params = pair.prefilled(prompt)
        name = in_flight_from_stopped_prefill(pair, prompt, params)
        try:
            with told(pair, "read: a read of "):
                answer = pair.finished(name, BOUND)
        finally:
            pair.prefill.signal(signal.SIGCONT)
        assert_not_pulled(pair, answer, prompt, expected)
        break_in(pair)


class TestDecode:
    """Decode is killed or stands still."""

    def test_killed_during_the_pull(self, pair: Pair) -> None:
        """2.2, 2.6, 2.7: prefill's blocks come back unasked; a new decode engine is served."""
        prompt = new_prompt()
        free = pair.prefill.ask("settle")
        with decode_replaced(pair), counted(pair, "leases_expired"):
            pair.held("read", prompt, pair.prefilled(prompt))
            pair.decode.signal(signal.SIGKILL)
            assert pair.prefill.ask("settle") == free

    def test_stopped_past_the_lease(self, policy_pair: Pair) -> None:
        """2.3, 2.6: prefill's blocks come back with nobody asking; late data is discarded."""
        pair, prompt = policy_pair, new_prompt()
        expected = pair.expected(prompt)
        free = pair.prefill.ask("settle")
        params = pair.prefilled(prompt)
        with counted(pair, "leases_expired"):
            name = in_flight_from_stopped_prefill(pair, prompt, params)
            pair.decode.signal(signal.SIGSTOP)
            try:
                pair.prefill.signal(signal.SIGCONT)
                assert pair.prefill.ask("settle") == free
            finally:
                pair.decode.signal(signal.SIGCONT)
            with told(pair, "gone: the lease at "):
                answer = pair.finished(name, BOUND)
        assert_not_pulled(pair, answer, prompt, expected)


MakeDetour = Callable[[dict[str, Any]], Detour]


@pytest.fixture
def detour() -> Iterator[MakeDetour]:
    """Makes detours, which are closed in the end."""
    with contextlib.ExitStack() as stack:
        yield lambda params: stack.enter_context(contextlib.closing(Detour(params)))


def warm_detour(pair: Pair, detour: MakeDetour) -> Detour:
    """One through which something was pulled already."""
    prompt = new_prompt()
    params = pair.prefilled(prompt)
    around = detour(params)
    assert pair.decoded(prompt, around.through(params))["scheduled"] <= PULLED
    assert len(around.data) == len(around.workers)
    return around


class TestNetwork:
    """A network between healthy engines that swallows bytes, or delays them."""

    @pytest.mark.parametrize("way", ["questions", "answers"])
    @pytest.mark.parametrize("to", ["lease", "worker"])
    def test_control_messages_are_swallowed(
        self, policy_pair: Pair, detour: MakeDetour, to: str, way: str
    ) -> None:
        """2.1: the lease endpoint, or the second of prefill's workers, does not answer."""
        pair, prompt = policy_pair, new_prompt()
        expected = pair.expected(prompt)
        params = pair.prefilled(prompt)
        around = detour(params)
        relay = around.lease if to == "lease" else around.workers[1]
        getattr(relay, way).swallow()
        with told(pair, f"unreachable: 127.0.0.1:{relay.port} did not answer "):
            answer = pair.finished(pair.started(prompt, around.through(params)), BOUND)
        assert_not_pulled(pair, answer, prompt, expected)
        assert getattr(relay, way).swallowed

    def test_control_messages_come_after_the_request_has_ended(
        self, pair: Pair, detour: MakeDetour
    ) -> None:
        """2.3, 2.4: they open and renew a lease that nobody uses; it ends like any other."""
        prompt = new_prompt()
        expected = pair.expected(prompt)
        free = pair.prefill.ask("settle")
        params = pair.prefilled(prompt)
        around = detour(params)
        around.lease.questions.hold()
        answer = pair.finished(pair.started(prompt, around.through(params)), BOUND)
        assert_not_pulled(pair, answer, prompt, expected)
        around.lease.questions.pass_on()
        assert pair.prefill.ask("settle") == free

    def test_the_answer_to_a_confirmation_is_lost(self, pair: Pair, detour: MakeDetour) -> None:
        """2.4: decode asks again and gets the same answer, although the lease is over."""
        prompt = new_prompt()
        expected = pair.expected(prompt)
        params = pair.prefilled(prompt)
        around = detour(params)
        with counted(pair, "leases_read"):
            name = pair.held("confirm", prompt, around.through(params))
            around.lease.answers.cut_off()
            pair.decode.call("fault_let_go")
            assert_pulled(pair.finished(name, BOUND), expected)

    def test_no_answer_to_a_confirmation_comes(self, policy_pair: Pair, detour: MakeDetour) -> None:
        """2.3: decode does not use what it cannot know to be good."""
        pair, prompt = policy_pair, new_prompt()
        expected = pair.expected(prompt)
        params = pair.prefilled(prompt)
        around = detour(params)
        with counted(pair, "leases_read"):
            name = pair.held("confirm", prompt, around.through(params))
            around.lease.answers.swallow()
            pair.decode.call("fault_let_go")
            answer = pair.finished(name, BOUND)
        assert_not_pulled(pair, answer, prompt, expected)

    def test_data_is_delayed(self, pair: Pair, detour: MakeDetour) -> None:
        """2.1: it is waited for."""
        prompt = new_prompt()
        expected = pair.expected(prompt)
        around = warm_detour(pair, detour)
        params = around.through(pair.prefilled(prompt))
        for relay in around.data:
            relay.answers.hold()
        name = pair.started(prompt, params)
        pair.decode.ask("step")
        eventually(lambda: any(relay.answers.held for relay in around.data))
        for relay in around.data:
            relay.answers.pass_on()
        assert_pulled(pair.finished(name, BOUND), expected)

    def test_data_is_swallowed(self, policy_pair: Pair, detour: MakeDetour) -> None:
        """2.1: the read ends with the transfer engine's bound, and prefill is told."""
        pair, prompt = policy_pair, new_prompt()
        expected = pair.expected(prompt)
        around = warm_detour(pair, detour)
        params = around.through(pair.prefilled(prompt))
        for relay in around.data:
            relay.answers.swallow(after=1000)
        with counted(pair, "leases_released"), told(pair, "read: a read of "):
            answer = pair.finished(pair.started(prompt, params), BOUND)
        assert_not_pulled(pair, answer, prompt, expected)


class TestTwice:
    """One id, or one offer, for two requests that live at the same time."""

    def test_two_requests_with_one_id(self, pair: Pair) -> None:
        """8.2: each gets what is its own, on both sides."""
        prompts = [new_prompt(100), new_prompt(60)]
        expected = [pair.expected(prompt) for prompt in prompts]
        for prompt in prompts:
            pair.prefill.ask("add", prompt=prompt, max_tokens=1, params=PREFILL, name="twin")
        answers = [pair.prefill.ask("finish", name="twin") for _ in prompts]
        offers = {a["params"]["remote_num_tokens"]: a["params"] for a in answers}
        assert len({offer["kvpp"]["transfer_id"] for offer in offers.values()}) == 2
        for prompt in prompts:
            arguments = {"prompt": prompt, "max_tokens": TOKENS, "params": offers[len(prompt)]}
            pair.decode.ask("add", name="twin", **arguments)
        ended = [pair.decode.ask("finish", BOUND, name="twin") for _ in prompts]
        assert sorted(answer["tokens"] for answer in ended) == sorted(expected)
        assert sum(answer["scheduled"] for answer in ended) <= 2 * PULLED

    def test_two_requests_with_one_offer(self, policy_pair: Pair) -> None:
        """8.2: the second one is refused while the first reads, and the first is not disturbed."""
        pair, prompt = policy_pair, new_prompt()
        expected = pair.expected(prompt)
        params = pair.prefilled(prompt)
        with counted(pair, "leases_read"):
            first = pair.held("read", prompt, params)
            with told(pair, "another decode request reads it"):
                second = pair.finished(pair.started(prompt, params), BOUND)
            assert_not_pulled(pair, second, prompt, expected)
            pair.decode.call("fault_let_go")
            assert_pulled(pair.finished(first, BOUND), expected)

    @pytest.mark.parametrize("how", ["aborted", "of another prompt"])
    def test_a_second_request_that_ends_early(self, pair: Pair, how: str) -> None:
        """8.2: its end does not end the lease that the first one reads under."""
        prompt = new_prompt()
        expected = pair.expected(prompt)
        params = pair.prefilled(prompt)
        with counted(pair, "leases_read"):
            first = pair.held("read", prompt, params)
            if how == "aborted":
                pair.decode.ask("abort", name=pair.started(prompt, params))
            else:
                pair.finished(pair.started(prompt[:50], params), BOUND)
            pair.decode.call("fault_let_go")
            assert_pulled(pair.finished(first, BOUND), expected)


def test_a_lease_expires_in_mid_read_and_its_blocks_are_used_again(
    policy_pair: Pair, detour: MakeDetour
) -> None:
    """2.3: the reads bring another request's bytes, and decode is told so before it uses them."""
    pair, prompt = policy_pair, new_prompt()
    expected = pair.expected(prompt)
    params = pair.prefilled(prompt)
    around = detour(params)
    with counted(pair, "leases_expired"):
        name = pair.held("read", prompt, around.through(params))
        around.lease.questions.swallow()  # renewals, too
        pair.prefill.ask("settle")
    other = pair.prefilled(new_prompt(LONGEST))
    blocks = set(params["remote_block_ids"][0])
    assert blocks & set(other["remote_block_ids"][0])
    around.lease.questions.pass_on()
    pair.decode.call("fault_let_go")
    with told(pair, "gone: the lease at "):
        answer = pair.finished(name, BOUND)
    assert_not_pulled(pair, answer, prompt, expected)


def test_a_failed_pull_is_an_error_and_the_engine_lives(engines: dict[str, Pair]) -> None:
    """2.1, policy "fail": also beside a request that is computed meanwhile."""
    pair = engines["fail"]
    pair.prefill = engines["recompute"].prefill
    prompt, beside = new_prompt(), new_prompt(60)
    with mended(pair):
        expected = pair.expected(beside)
        params = pair.prefilled(prompt)
        pair.prefill.ask("settle")  # the offer expires
        failed, good = pair.started(prompt, params), pair.started(beside, None)
        answer = pair.finished(failed, BOUND)
        assert (answer["finish"], answer["tokens"]) == ("error", [])
        assert pair.finished(good, BOUND)["tokens"] == expected
