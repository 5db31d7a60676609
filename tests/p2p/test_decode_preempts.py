"""Decode preempts a request whose KV was pulled: it is computed again, never pulled again.

Field report 2.8: prefill has let go of the blocks long ago, and a request that asked for them a
second time would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.engine import tiny_models
from tests.engine.harness import kvpp_off, kvpp_on, random_tokens
from tests.p2p.engine_pair import PREFILL, transfer
from tests.p2p.remote_engine import RemoteEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCKS = 15  # of 16 tokens; two requests of 100 and 40 tokens take 18
TOKENS = 40
PROMPTS = [list(random_tokens(seed, 100)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("preempts") / "model", tiny_models.MLA)


@pytest.fixture(scope="module")
def prefill(model: Path, ports: Callable[[int], Sequence[int]]) -> Iterator[RemoteEngine]:
    """Two ranks with KVPP."""
    with RemoteEngine(
        model,
        model.parent / "prefill.log",
        additional_config=kvpp_on(),
        tp=2,
        kv_transfer_config=transfer("kv_producer", ports(2)[0], lease_seconds=60.0),
    ) as engine:
        yield engine.wait_ready()


@pytest.fixture(scope="module")
def decode(model: Path, ports: Callable[[int], Sequence[int]]) -> Iterator[RemoteEngine]:
    """One rank, with blocks for one and a half requests. A failed load would fail its request."""
    with RemoteEngine(
        model,
        model.parent / "decode.log",
        additional_config=kvpp_off(),
        tp=1,
        blocks=BLOCKS,
        max_model_len=160,
        kv_transfer_config=transfer("kv_consumer", ports(1)[0], "fail"),
    ) as engine:
        yield engine.wait_ready()


def test_a_preempted_request_is_computed_again(prefill: RemoteEngine, decode: RemoteEngine) -> None:
    expected = []
    for prompt in PROMPTS:
        expected.append(decode.ask("generate", prompt=prompt, max_tokens=TOKENS)["tokens"])
        decode.ask("reset")
    blocks = prefill.ask("blocks"), decode.ask("blocks")
    params = [
        prefill.ask("generate", prompt=prompt, max_tokens=1, params=PREFILL)["params"]
        for prompt in PROMPTS
    ]
    names = [
        decode.ask("add", prompt=prompt, max_tokens=TOKENS, params=offer)
        for prompt, offer in zip(PROMPTS, params, strict=True)
    ]
    answers = [decode.ask("finish", name=name) for name in names]
    assert [answer["tokens"] for answer in answers] == expected
    assert sum(answer["preempted"] for answer in answers) > 0
    assert (prefill.ask("settle"), decode.ask("settle")) == blocks
    assert prefill.ask("counts")["leases_read"] == len(PROMPTS)
