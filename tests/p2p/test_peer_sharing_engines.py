"""A real decode engine of two ranks whose ranks share their pulls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.engine import tiny_models
from tests.engine.faults import WorkerFaults
from tests.engine.harness import kvpp_off, random_tokens
from tests.p2p.engine_pair import PREFILL, TOKENS, transfer
from tests.p2p.remote_engine import RemoteEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class Pulls(WorkerFaults):
    """Seen by ``collective_rpc``: what a worker's pulls brought, and from where."""

    def watch_pulls(self, _: Any = None) -> None:
        """Note results instead of logging them."""
        self._seen: list[tuple[int, int]] = []
        connector: Any = get_kv_transfer_group()
        connector._worker._log = lambda result: self._seen.append(
            (result.bytes, result.shared_bytes)
        )

    def pulls(self, _: Any = None) -> list[tuple[int, int]]:
        """Bytes from prefill and from the other rank."""
        return self._seen


def test_two_ranks_share_and_answer_like_one_that_computes(
    tmp_path: Path, ports: Callable[[int], Sequence[int]]
) -> None:
    """Each rank has half of the bytes from prefill and half from the other; none is computed."""
    model = tiny_models.write(tmp_path / "model", replace(tiny_models.MLA, layers=12))
    with (
        RemoteEngine(
            model,
            tmp_path / "prefill.log",
            additional_config=kvpp_off(),
            kv_transfer_config=transfer("kv_producer", ports(1)[0]),
            tp=1,
        ) as prefill,
        RemoteEngine(
            model,
            tmp_path / "decode.log",
            additional_config=kvpp_off(),
            worker_extension_cls=f"{__name__}.Pulls",
            kv_transfer_config=transfer(
                "kv_consumer", ports(2)[0], share_pulls=True, share_wait_s=60.0
            ),
            tp=2,
        ) as decode,
    ):
        decode.wait_ready()
        prefill.wait_ready()
        decode.call("watch_pulls", None)
        free = prefill.ask("blocks"), decode.ask("blocks")
        for seed, length in ((1, 100), (2, 33)):
            prompt = list(random_tokens(seed, length))
            expected = decode.ask("generate", prompt=prompt, max_tokens=TOKENS)["tokens"]
            decode.ask("reset")
            offered = prefill.ask("generate", prompt=prompt, max_tokens=1, params=PREFILL)
            answer = decode.ask(
                "generate", prompt=prompt, max_tokens=TOKENS, params=offered["params"]
            )
            assert answer["tokens"] == expected
            assert answer["scheduled"] <= TOKENS + 1
        assert (prefill.ask("settle"), decode.ask("settle")) == free
        assert prefill.ask("counts")["leases_read"] == 2
        pulls = decode.call("pulls", None)
        assert len(pulls) == 2
        assert all(pulled == shared != 0 for pulled, shared in pulls)
