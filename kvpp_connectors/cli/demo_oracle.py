"""The demo's oracle, as a process of its own: transformers' logits for what an engine answered.

    python -m kvpp_connectors.cli.demo_oracle MODEL QUESTIONS.json RESULT.json

Every answer is recomputed in one full forward of transformers' DeepseekV2ForCausalLM: no cache, no
chunks, no KVPP.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from pydantic import BaseModel

__all__ = ["OracleResult", "Questions", "main", "oracle_logprobs"]


class Questions(BaseModel):
    """Prompts and the tokens that an engine answered with."""

    prompts: list[list[int]]
    answers: list[list[int]]


def oracle_logprobs(model: Path, questions: Questions) -> list[list[float]]:
    """Log-probability of every answered token given all tokens before it."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    logprobs = []
    for prompt, answer in zip(questions.prompts, questions.answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer]])
        with torch.inference_mode():
            logits = network(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows = torch.log_softmax(logits.float(), dim=-1)
        logprobs.append(rows.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist())
    return logprobs


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
