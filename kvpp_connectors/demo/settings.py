"""Settings of a run of the demo, shared by its engines and servers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from kvpp_connectors.demo.prompts import random_tokens

__all__ = ["ENVIRONMENT", "DemoSettings"]

# Small models on few cores: one thread a rank, no warm-up.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}
_FAMILIES, _PER_FAMILY = 2, 3  # families of prompts, and prompts in each
_SHARED, _OWN = 96, 54  # tokens that a family shares, and tokens of one prompt alone
_MAX_TOKENS = 24  # of an answer


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Ranks, KV memory in bytes per rank, lengths in tokens, and where logs and results go."""

    folder: Path
    console: Console
    vocabulary: int
    tensor_parallel_size: int
    memory: int
    max_num_batched_tokens: int = 64
    max_tokens: int = _MAX_TOKENS
    max_model_len: int = _SHARED + _OWN + _MAX_TOKENS + 1  # for `prompts` and their answers
    layerwise: bool = False  # the pool child saves and loads layer by layer
    pool_mib: int = 512  # memory that the pool's store lends
    decode_memory: int | None = None  # bytes; None: as much as prefill
    decode_load_failures: str = "fail"  # recomputing would hide a failed load
    environment: Mapping[str, str] = field(default_factory=lambda: ENVIRONMENT)

    @property
    def model(self) -> Path:
        """The folder of the checkpoint."""
        return self.folder / "model"

    def prompts(self) -> list[list[int]]:
        """Families of prompts with a common prefix; each is longer than the token budget."""
        tokens = partial(random_tokens, random.Random(0), vocabulary=self.vocabulary)
        families = [tokens(_SHARED) for _ in range(_FAMILIES)]
        return [shared + tokens(_OWN) for shared in families for _ in range(_PER_FAMILY)]
