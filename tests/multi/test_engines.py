"""Prefill with P/D and pool children under KVPP, decode alone: both children serve one request.

Prefill is restarted, so that what it loads comes from the pool and not from its own cache.
Field report 2.9: one child loads, both save, blocks are freed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine import tiny_models
from tests.engine.harness import kvpp_off, kvpp_on, random_tokens
from tests.p2p.remote_engine import RemoteEngine
from tests.pool.master import Master
from tests.pool.store_process import StoreProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("patient_clients"),
]

MTP = {"method": "mtp", "num_speculative_tokens": 1}
PREFILL = {"do_remote_decode": True}
TOKENS, BLOCK = 12, 16
LENGTHS = (100, 64, 200, 30)
PROMPTS = [list(random_tokens(seed, length)) for seed, length in enumerate(LENGTHS)]


@dataclass
class Site:
    """A pool, a decode engine, and prefill engines one after another."""

    folder: Path
    model: Path
    store: StoreProcess
    decode: RemoteEngine

    def prefill(self, layerwise: bool) -> RemoteEngine:
        """A new prefill engine: two ranks with KVPP, both children."""
        pool = {
            "mooncake": {
                "master_server_address": self.store.master.address,
                "global_segment_size": 0,
            },
            "use_layerwise": layerwise,
            "model_id": f"layerwise {layerwise}",
            "lookup_deadline_s": 30.0,
            "lookup_wait_s": 1.0,
        }
        children = [
            {
                "kv_connector": "MooncakeConnectorV2",
                "kv_role": "kv_producer",
                "kv_port": 0,
                "kv_connector_extra_config": {"model_id": "tiny"},
            },
            {
                "kv_connector": "AscendStoreConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": pool,
            },
        ]
        return RemoteEngine(
            self.model,
            self.folder / "prefill.log",
            additional_config=kvpp_on(),
            tp=2,
            speculative_config=MTP,
            kv_transfer_config={
                "kv_connector": "MultiConnector",
                "kv_role": "kv_producer",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": children},
            },
        ).wait_ready()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Everything but prefill."""
    folder = tmp_path_factory.mktemp("multi")
    model = tiny_models.write(folder / "model", replace(tiny_models.SHARED, drafts=1))
    master = Master()
    store = StoreProcess(master, "512MB")
    decode = RemoteEngine(
        model,
        folder / "decode.log",
        additional_config=kvpp_off(),
        tp=1,
        speculative_config=MTP,
        kv_transfer_config={
            "kv_connector": "MooncakeConnectorV2",
            "kv_role": "kv_consumer",
            "kv_port": 0,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"model_id": "tiny", "pull_timeout_s": 150.0},
        },
    )
    try:
        yield Site(folder, model, store, decode.wait_ready())
    finally:
        decode.stop()
        store.stop()
        master.stop()


@pytest.fixture(scope="module")
def expected(site: Site) -> list[list[int]]:
    """What decode answers on its own."""
    return [
        site.decode.ask("generate", prompt=prompt, max_tokens=TOKENS)["tokens"]
        for prompt in PROMPTS
    ]


def served(site: Site, prefill: RemoteEngine) -> tuple[list[list[int]], int]:
    """Decode's answers to prompts that prefill computes, and the tokens that prefill found cached.

    Decode fails a request whose KV does not come; both sides end with the blocks that they had.
    """
    site.decode.ask("reset")
    before = prefill.ask("blocks"), site.decode.ask("blocks")
    answers, cached = [], 0
    for prompt in PROMPTS:
        first = prefill.ask("generate", prompt=prompt, max_tokens=1, params=PREFILL)
        cached += first["cached"]
        answer = site.decode.ask(
            "generate", prompt=prompt, max_tokens=TOKENS, params=first["params"]
        )
        assert answer["scheduled"] <= 2 * TOKENS  # decode computed no prompt
        answers.append(answer["tokens"])
    assert (prefill.ask("settle"), site.decode.ask("settle")) == before
    return answers, cached


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole blocks", "layer by layer"])
def test_both_children_serve_one_request(
    site: Site, expected: list[list[int]], layerwise: bool
) -> None:
    loaded = sum(min(length // BLOCK * BLOCK, length - 1) for length in LENGTHS)
    with site.prefill(layerwise) as prefill:
        assert served(site, prefill) == (expected, 0)
    with site.prefill(layerwise) as prefill:
        assert served(site, prefill) == (expected, loaded)
        stats: dict[str, Any] = prefill.ask("counts")
        assert stats["leases_read"] == len(PROMPTS)
