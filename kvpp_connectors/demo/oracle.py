"""The demo's oracle, as a process of its own: transformers' logits for what an engine answered.

    python -m kvpp_connectors.demo.oracle MODEL QUESTIONS.json RESULT.json

Every answer is recomputed in one full forward of transformers' own model: no cache, no chunks,
no KVPP.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

__all__ = ["OracleResult", "Questions", "main", "oracle_logprobs"]


class Questions(BaseModel):
    """Prompts and the tokens that an engine answered with."""

    prompts: list[list[int]]
    answers: list[list[int]]


def oracle_logprobs(model: Path, questions: Questions) -> list[list[float]]:
    """Log-probability of every answered token given all tokens before it."""
    network = _load(model)
    logprobs = []
    for prompt, answer in zip(questions.prompts, questions.answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer]])
        with torch.inference_mode():
            logits = network(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows = torch.log_softmax(logits.float(), dim=-1)
        logprobs.append(rows.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist())
    return logprobs


def _load(model: Path) -> Any:
    """The class that config.json names: vLLM changes what transformers' Auto classes choose."""
    import transformers

    kind = getattr(
        transformers, json.loads((model / "config.json").read_text())["architectures"][0]
    )
    config = kind.config_class.from_pretrained(model)
    return kind.from_pretrained(model, config=config, dtype=torch.float32).eval()


class OracleResult(BaseModel):
    """Log-probabilities, per answer and token."""

    logprobs: list[list[float]]


def main() -> None:
    """Answer the questions named on the command line."""
    questions = Questions.model_validate_json(Path(sys.argv[2]).read_text())
    result = OracleResult(logprobs=oracle_logprobs(Path(sys.argv[1]), questions))
    Path(sys.argv[3]).write_text(result.model_dump_json())


if __name__ == "__main__":
    main()
