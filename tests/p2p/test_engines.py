"""Prefill and decode engines in processes of their own, over a real Transfer Engine.

Prefill: two ranks with KVPP and a draft layer; decode: one rank without KVPP. What decode answers
after a pull is what it answers when it computes everything itself; "scheduled" counts the tokens
that it really computed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine import tiny_models
from tests.engine.harness import kvpp_off, kvpp_on, random_tokens
from tests.p2p.engine_pair import PREFILL, TOKENS, Pair, transfer
from tests.p2p.remote_engine import RemoteEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, ports: Callable[[int], Sequence[int]]
) -> Iterator[Pair]:
    """Sparse models with a draft layer on both sides."""
    folder = tmp_path_factory.mktemp("pd")
    model = tiny_models.write(folder / "model", replace(tiny_models.SHARED, drafts=1))
    prefill, _, decode = ports(3)
    engines = Pair(folder, model, prefill, decode)
    try:
        engines.start_decode()
        engines.start_prefill()
        engines.decode.wait_ready()
        engines.prefill.wait_ready()
        yield engines
    finally:
        engines.stop()


@pytest.mark.smoke
def test_a_pulled_prompt_is_answered_like_a_computed_one(pair: Pair) -> None:
    """Target and draft layers, from their owners; nothing of the prompt is computed again."""
    blocks = pair.prefill.ask("blocks"), pair.decode.ask("blocks")
    for seed, length in ((1, 100), (2, 64), (3, 200), (4, 7)):
        prompt = list(random_tokens(seed, length))
        expected = pair.expected(prompt)
        answer = pair.decoded(prompt, pair.prefilled(prompt))
        assert answer["tokens"] == expected
        assert answer["scheduled"] <= 2 * TOKENS  # no prompt tokens but the last one
    assert (pair.prefill.ask("settle"), pair.decode.ask("settle")) == blocks


def test_a_prefix_that_decode_has_is_not_pulled(pair: Pair) -> None:
    """The tail of a prompt is pulled; of a prompt that is all there nothing is, and it is released
    (field report 4.6)."""
    prompt = list(random_tokens(5, 160))
    expected = pair.expected(prompt)
    assert pair.decoded(prompt[:96], None)["finish"] == "length"
    assert pair.decoded(prompt, pair.prefilled(prompt))["tokens"] == expected
    before = pair.prefill.ask("counts")
    assert pair.decoded(prompt[:96], pair.prefilled(prompt[:96]))["finish"] == "length"
    pair.prefill.ask("settle")
    after = pair.prefill.ask("counts")
    ended = ("leases_read", "leases_released")
    assert sum(after[k] for k in ended) == sum(before[k] for k in ended) + 1
    assert after["leases_expired"] == before["leases_expired"]


def test_used_offers_are_gone(pair: Pair) -> None:
    """A retry with the same transfer data is computed, not served from reused blocks (8.2)."""
    prompt = list(random_tokens(6, 100))
    expected = pair.expected(prompt)
    params = pair.prefilled(prompt)
    assert pair.decoded(prompt, params)["tokens"] == expected
    pair.prefill.ask("settle")
    pair.decode.ask("reset")
    again = pair.decoded(prompt, params)
    assert again["tokens"] == expected and again["scheduled"] >= len(prompt)


def test_a_request_that_decode_drops_is_released(pair: Pair) -> None:
    """Aborted before it was scheduled: prefill's blocks are free before the lease ends (2.2)."""
    prompt = list(random_tokens(7, 100))
    free = pair.prefill.ask("blocks")
    before = pair.prefill.ask("counts")
    params = pair.prefilled(prompt)
    name = pair.decode.ask("add", prompt=prompt, max_tokens=TOKENS, params=params)
    pair.decode.ask("abort", name=name)
    assert pair.prefill.ask("settle") == free
    after = pair.prefill.ask("counts")
    assert after["leases_released"] == before["leases_released"] + 1
    assert after["leases_expired"] == before["leases_expired"]


def test_an_offer_that_nobody_takes_expires(pair: Pair) -> None:
    """And a late reader is told so, and computes (2.3)."""
    prompt = list(random_tokens(8, 100))
    free = pair.prefill.ask("blocks")
    expected = pair.expected(prompt)
    params = pair.prefilled(prompt)
    assert pair.prefill.ask("settle") == free
    late = pair.decoded(prompt, params)
    assert late["tokens"] == expected and late["scheduled"] >= len(prompt)
    assert pair.prefill.ask("settle") == free


def test_other_prompts_and_broken_params_are_computed(pair: Pair) -> None:
    """Another number of tokens, another engine's words: one error line, the right answer."""
    prompt = list(random_tokens(9, 100))
    expected = pair.expected(prompt)
    params = pair.prefilled(prompt[:90])
    assert pair.decoded(prompt, params)["tokens"] == expected
    pair.decode.ask("reset")
    broken = {"do_remote_prefill": True, "remote_block_ids": [[1]], "kvpp": "yes"}
    assert pair.decoded(prompt, broken)["tokens"] == expected


def test_a_stopped_prefill_costs_time_only(pair: Pair) -> None:
    """SIGSTOP before the pull: decode computes within its bounds; afterwards both work (2.1)."""
    prompt = list(random_tokens(10, 100))
    expected = pair.expected(prompt)
    params = pair.prefilled(prompt)
    pair.prefill.signal(signal.SIGSTOP)
    try:
        assert pair.decoded(prompt, params)["tokens"] == expected
    finally:
        pair.prefill.signal(signal.SIGCONT)
    pair.prefill.ask("settle")
    prompt = list(random_tokens(11, 100))
    expected = pair.expected(prompt)
    answer = pair.decoded(prompt, pair.prefilled(prompt))
    assert answer["tokens"] == expected and answer["scheduled"] <= 2 * TOKENS


def test_a_restarted_prefill_is_a_new_one(pair: Pair) -> None:
    """SIGKILL, the same ports again: the old offer is computed, a new one is pulled (2.1, 2.7)."""
    prompt = list(random_tokens(12, 100))
    expected = pair.expected(prompt)
    params = pair.prefilled(prompt)
    pair.prefill.signal(signal.SIGKILL)
    pair.prefill.stop()
    assert pair.decoded(prompt, params)["tokens"] == expected
    pair.start_prefill()
    pair.prefill.wait_ready()
    pair.decode.ask("reset")
    assert pair.decoded(prompt, params)["tokens"] == expected
    pair.decode.ask("reset")
    answer = pair.decoded(prompt, pair.prefilled(prompt))
    assert answer["tokens"] == expected and answer["scheduled"] <= 2 * TOKENS
    assert pair.decode.ask("settle")["requests"] == 0


TOPOLOGIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one rank to two": ({"tp": 1}, kvpp_off(), {"tp": 2}),
    "four ranks to one": ({"tp": 4}, kvpp_on(), {"tp": 1}),
    "two stages of two ranks to one": (
        {"tp": 2, "pipeline_parallel_size": 2},
        kvpp_on(),
        {"tp": 1},
    ),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_unequal_topologies(tmp_path: Path, name: str) -> None:
    """Every decode rank gets every layer once, from whichever rank keeps it (3.1, 3.7)."""
    ranks, additional, decode_ranks = TOPOLOGIES[name]
    model = tiny_models.write(tmp_path / "model", replace(tiny_models.MLA, layers=12))
    prompt = list(random_tokens(20, 100))
    with (
        RemoteEngine(
            model,
            tmp_path / "prefill.log",
            additional_config=additional,
            kv_transfer_config=transfer("kv_producer", 0),
            **ranks,
        ) as prefill,
        RemoteEngine(
            model,
            tmp_path / "decode.log",
            additional_config=kvpp_off(),
            kv_transfer_config=transfer("kv_consumer", 0),
            **decode_ranks,
        ) as decode,
    ):
        decode.wait_ready()
        prefill.wait_ready()
        free = prefill.ask("blocks")
        expected = decode.ask("generate", prompt=prompt, max_tokens=TOKENS)
        decode.ask("reset")
        offered = prefill.ask("generate", prompt=prompt, max_tokens=1, params=PREFILL)
        answer = decode.ask("generate", prompt=prompt, max_tokens=TOKENS, params=offered["params"])
        assert answer["tokens"] == expected["tokens"]
        assert answer["scheduled"] == TOKENS
        assert prefill.ask("settle") == free
        assert prefill.ask("counts")["leases_read"] == 1
