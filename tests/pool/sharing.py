"""Engines that share a pool: prompts of whole and of partial blocks, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.harness import Request, Script, random_tokens, start_engine
from tests.fork_server import call_apart
from tests.pool.pool_engine import counted

__all__ = ["BLOCK", "LOADED", "PROMPTS", "WAYS", "Ran", "assert_missed", "run"]

# When what is found is loaded: kv_connector_extra_config.
WAYS: dict[str, dict[str, Any]] = {
    "before the step": {},
    "between steps": {"load_async": True},
    "layer by layer": {"use_layerwise": True},
}

BLOCK = 16  # tokens
_LENGTHS = (100, 64, 200, 30)
PROMPTS = [random_tokens(seed, length) for seed, length in enumerate(_LENGTHS)]
_SCRIPT = Script(tuple(Request(prompt, max_tokens=8) for prompt in PROMPTS))
# What a full pool spares. A prompt of whole blocks is loaded but for its last token.
LOADED = sum(min(length // BLOCK * BLOCK, length - 1) for length in _LENGTHS)


@dataclass(frozen=True)
class Ran:
    """What came of the prompts in an engine of its own."""

    tokens: list[list[int]]  # logprobs may differ in the last bit with how a prompt is cut
    cached: int  # prompt tokens that were not computed
    lookups: dict[str, int]  # counters of the scheduler half


def run(
    model: Path, kvpp: dict[str, Any], pool: dict[str, Any] | None = None, **options: Any
) -> Ran:
    """The prompts in an engine and a process of its own, which has saved all that it is to save."""
    return call_apart(_run, model, kvpp, pool, options)


def _run(
    model: Path, kvpp: dict[str, Any], pool: dict[str, Any] | None, options: dict[str, Any]
) -> Ran:
    with start_engine(model, kvpp, **options, kv_transfer_config=pool) as engine:
        lookups = {} if pool is None else counted(engine._scheduler.connector._stats)
        answers = engine.run(_SCRIPT).answers
        if pool is not None:
            engine.drain()
    return Ran(
        [answer.tokens for answer in answers],
        sum(answer.cached_tokens for answer in answers),
        dict(lookups),
    )


def assert_missed(ran: Ran) -> None:
    """It looked for its blocks, found none, and met no error."""
    wrong = [name for name in ran.lookups if "failed" in name or "unavailable" in name]
    asked, hit = (ran.lookups.get(f"lookup_blocks_{what}", 0) for what in ("asked", "hit"))
    assert (ran.cached, asked > 0, hit, wrong) == (0, True, 0, []), ran.lookups
