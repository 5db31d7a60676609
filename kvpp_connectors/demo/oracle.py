"""The demo's oracle in a process of its own: transformers' logprobs of an engine's answers.

    python -m kvpp_connectors.demo.oracle MODEL QUESTIONS.json RESULT.json

Each answer is one full forward pass of transformers' own model: no cache, no chunks, no KVPP.
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
    """Prompts and an engine's answers, as token ids."""

    prompts: list[list[int]]
    answers: list[list[int]]


def oracle_logprobs(model: Path, questions: Questions) -> list[list[float]]:
    """Logprob of every token of the answers, by answer."""
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
    """Load with the class that config.json names: vLLM changes transformers' Auto classes."""
    import transformers

    kind = getattr(
        transformers, json.loads((model / "config.json").read_text())["architectures"][0]
    )
    config = kind.config_class.from_pretrained(model)
    return kind.from_pretrained(model, config=config, dtype=torch.float32).eval()


class OracleResult(BaseModel):
    """Logprobs by answer and token."""

    logprobs: list[list[float]]


def main() -> None:
    """Answer the questions named on the command line."""
    questions = Questions.model_validate_json(Path(sys.argv[2]).read_text())
    result = OracleResult(logprobs=oracle_logprobs(Path(sys.argv[1]), questions))
    Path(sys.argv[3]).write_text(result.model_dump_json())


if __name__ == "__main__":
    main()
