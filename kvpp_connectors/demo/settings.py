"""What a run of the demo is made of, the same for engines and servers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from kvpp_connectors.demo.prompts import random_tokens

__all__ = ["ENVIRONMENT", "Settings"]

# Small models on few cores: one thread a rank, no warm-up.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}
_FAMILIES, _PER_FAMILY, _SHARED, _OWN = 2, 3, 96, 54  # prompts and their tokens
_MAX_TOKENS = 24  # of an answer


@dataclass(frozen=True, slots=True)
class Settings:
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
    pool_mib: int = 512  # of a process that outlives the engines
    decode_memory: int | None = None  # bytes, where it is not prefill's
    decode_load_failures: str = "fail"  # nothing is computed in secret
    environment: Mapping[str, str] = field(default_factory=lambda: ENVIRONMENT)

    @property
    def model(self) -> Path:
        """The folder of the checkpoint."""
        return self.folder / "model"

    def prompts(self) -> list[list[int]]:
        """Families of prompts that share their first tokens; each longer than the token budget."""
        numbers = random.Random(0)

        tokens = partial(random_tokens, numbers, vocabulary=self.vocabulary)

        families = [tokens(_SHARED) for _ in range(_FAMILIES)]
        return [shared + tokens(_OWN) for shared in families for _ in range(_PER_FAMILY)]
