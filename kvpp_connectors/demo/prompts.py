"""Prompts of the demo's engines (random tokens) and how they are sampled (greedily)."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["VOCABULARY", "greedy", "random_tokens"]

VOCABULARY = 512  # token ids of the demo's model


def random_tokens(numbers: random.Random, count: int, vocabulary: int = VOCABULARY) -> list[int]:
    """The next ``count`` token ids, without 0 and 1: beginning and end of a text."""
    return [numbers.randrange(2, vocabulary) for _ in range(count)]


def greedy(max_tokens: int, **more: Any) -> Any:
    """vLLM's SamplingParams: greedy, exactly ``max_tokens`` tokens, no text."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **more
    )
