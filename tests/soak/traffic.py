"""Random scripts that depend on their seed alone."""

from __future__ import annotations

import random

from tests.engine.harness import Request, Script, random_tokens

__all__ = ["BLOCKS", "make_script"]

BLOCKS = 36  # of 16 tokens: little more than one request of the longest kind
ARRIVALS = 30  # steps
LONGEST_PROMPT, LONGEST_ANSWER = 300, 60  # tokens
PREFIXES = tuple(random_tokens(1000 + number, LONGEST_PROMPT) for number in range(2))


def make_script(seed: int) -> Script:
    """8 to 16 requests; half share a prefix with others, a quarter is aborted."""
    numbers = random.Random(seed)
    return Script(tuple(_request(numbers) for _ in range(numbers.randint(8, 16))))


def _request(numbers: random.Random) -> Request:
    # Long prompts and short ones alike: the length is uniform below a limit that is too.
    length = numbers.randint(1, numbers.choice((16, 64, LONGEST_PROMPT)))
    shared = 0
    if numbers.random() < 0.5:
        length = numbers.randint(1, LONGEST_PROMPT)
        shared = numbers.randint(length // 2, length)
    arrives = numbers.randint(0, ARRIVALS)
    return Request(
        prompt=numbers.choice(PREFIXES)[:shared]
        + random_tokens(numbers.getrandbits(32), length - shared),
        max_tokens=numbers.randint(1, LONGEST_ANSWER),
        arrives=arrives,
        aborted=arrives + numbers.randint(0, 40) if numbers.random() < 0.25 else None,
        priority=numbers.randint(0, 3),
    )
