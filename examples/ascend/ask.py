"""Ask a server for greedy answers, or compare two files of them. Standard library only.

ask.py URL FILE           writes the answers' token ids
ask.py --compare A B      prints how many are equal; exit code 1 if one is not
"""

from __future__ import annotations

import json
import random
import sys
import urllib.request
from pathlib import Path

LENGTHS = (40, 300, 900, 2000)  # tokens: chunked prefill, and whole blocks of 128 to cache
MAX_TOKENS = 16
TIMEOUT_S = 600


def ask(url: str) -> list[list[int]]:
    """Token ids of the answers to prompts that are the same in every call."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=TIMEOUT_S) as answer:
        model = json.load(answer)["data"][0]
    chosen = random.Random(128)
    limit = model["max_model_len"] - MAX_TOKENS
    answers = []
    for length in LENGTHS:
        prompt = [chosen.randrange(5, 500) for _ in range(length)]
        if length > limit:
            continue
        body = {
            "model": model["id"],
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            answers.append(json.load(answer)["choices"][0]["token_ids"])
    return answers


def main() -> int:
    if sys.argv[1] == "--compare":
        mine, other = (json.loads(Path(name).read_text()) for name in sys.argv[2:4])
        equal = sum(a == b for a, b in zip(mine, other, strict=True))
        print(f"{equal} of {len(other)} answers are equal")
        return int(equal != len(other))
    Path(sys.argv[2]).write_text(json.dumps(ask(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
