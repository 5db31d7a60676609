"""`benchmarks pool --engines`: prompts saved and loaded by real engines, ours against vLLM's.

Two engines, each in a process of its own with its own connector, share one pool and alternate: with
new prompts, until all is saved; then with the last prompts and an empty prefix cache, so that all
comes from the pool. Without KVPP, which vLLM's MooncakeStoreConnector does not support.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import Engine
from benchmarks.interleaved import Spread, interleave, medians, ratio
from benchmarks.timeouts import LOOKUPS
from kvpp_connectors.demo.prompts import greedy, random_tokens

__all__ = ["EngineTiming", "time_engines"]

PROMPTS, LENGTH = 4, 1536  # tokens each
_IDLE_S = 0.001  # vLLM's loop pauses as long after a step that computed nothing


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """Median seconds for all prompts, and ratios within a turn: above 1 ours is faster."""

    ours_new: float  # computed, answered and saved
    vllm_new: float
    ours_again: float  # loaded and answered
    vllm_again: float
    ours_to_vllm_new: Spread
    ours_to_vllm_again: Spread


def time_engines(master: str, folder: Path, repeats: int) -> EngineTiming:
    """Time both connectors over the pool of ``master``.

    Raises:
        RuntimeError: an engine failed, or loaded an unexpected number of tokens.
    """
    from kvpp_connectors.demo.model import TinyModel, write_checkpoint

    model = str(write_checkpoint(folder / "model", TinyModel()))
    with ExitStack() as stack:
        ours = stack.enter_context(_Engine(model, _ours(master), {}))
        vllms = stack.enter_context(_Engine(model, _VLLMS, _vllms_environment(master, folder)))
        new = interleave({"ours_new": ours.new, "vllm_new": vllms.new}, repeats)
        again = interleave({"ours_again": ours.again, "vllm_again": vllms.again}, repeats)
    return EngineTiming(
        **medians(new),
        **medians(again),
        ours_to_vllm_new=ratio(new, "vllm_new", "ours_new"),
        ours_to_vllm_again=ratio(again, "vllm_again", "ours_again"),
    )


_VLLMS: dict[str, Any] = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"load_async": True},  # it has no other way
}


def _ours(master: str) -> dict[str, Any]:
    mooncake = {"master_server_address": master, "global_segment_size": 0, "protocol": "tcp"}
    return {
        "kv_connector": "AscendStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "mooncake": mooncake,
            "load_async": True,
            **LOOKUPS,
        },
    }


def _vllms_environment(master: str, folder: Path) -> dict[str, str]:
    config = folder / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "mode": "standalone-store",
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": master,
                "protocol": "tcp",
                "global_segment_size": 0,
                "local_buffer_size": 64 << 20,
            }
        )
    )
    return {"MOONCAKE_CONFIG_PATH": str(config)}


class _Engine(Engine):
    """An engine with one of the connectors."""

    def __init__(
        self, model: str, transfer: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        super().__init__(
            f"the engine with {transfer['kv_connector']}",
            _generate,
            model,
            environment,
            _define_cpu_events,
            kv_transfer_config=dict(transfer),
            kv_cache_memory_bytes=256 << 20,
            max_num_batched_tokens=PROMPTS * LENGTH,
            max_model_len=2048,
            max_num_seqs=PROMPTS,
            enable_prefix_caching=True,
        )
        self._seed = 0

    def new(self) -> float:
        """Seconds for new prompts."""
        self._seed += 1
        seconds: float = self.call((self._seed, False))
        return seconds

    def again(self) -> float:
        """Seconds for the last prompts, with an empty prefix cache."""
        seconds: float = self.call((self._seed, True))
        return seconds


def _define_cpu_events() -> None:
    """Define torch.cuda.Event on CPU: vLLM's connector records one before each save."""
    import torch

    class CpuEvent:
        def record(self) -> None:
            """Do nothing: everything has been computed."""

        def synchronize(self) -> None:
            """Do nothing: there is nothing to wait for."""

    if not torch.cuda.is_available():
        torch.cuda.Event = CpuEvent  # type: ignore[assignment,misc]


def _generate(llm: Any, request: tuple[int, bool]) -> float:
    """In the engine's process: seconds until all prompts are answered and saved."""
    seed, again = request
    numbers = random.Random(seed)
    prompts = [random_tokens(numbers, LENGTH) for _ in range(PROMPTS)]
    engine, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
    if again and not llm.reset_prefix_cache():
        raise RuntimeError("the engine's own cache could not be emptied: blocks are in use")
    sampling = greedy(1)
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    cached = 0
    while scheduler.has_requests():
        outputs = engine.step()
        cached += sum(out.num_cached_tokens or 0 for out in outputs if out.finished)
        if not outputs:
            time.sleep(_IDLE_S)
    seconds = time.perf_counter() - started
    expected = PROMPTS * (LENGTH - 1) if again else 0
    if not expected - PROMPTS * 16 <= cached <= expected:
        raise RuntimeError(f"{cached} tokens came from the pool; expected {expected}")
    return seconds
