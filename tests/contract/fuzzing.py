"""`kvpp check` of many mutated launches in one process, and what must not come of any of them."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["answer_all"]


def answer_all(lines: Sequence[tuple[list[str], str | None]]) -> dict[str, Any]:
    """What went wrong, and how often each exit code came; an error that escapes ends it.

    Wrong are an answer without a sentence, a problem that is told twice, and an error of our own
    code that is passed off as one of vLLM's.

    Args:
        lines: words of a launch line, and the platform to judge for or None.
    """
    from kvpp_connectors.cli.check import check_line
    from kvpp_connectors.cli.launch_line import NotALaunch
    from kvpp_connectors.launch.platforms import Platform

    wrong: list[Any] = []
    codes: Counter[str] = Counter()
    for words, platform in lines:
        try:
            answer = check_line(words, Platform(platform) if platform else None)
        except NotALaunch as error:
            codes["2"] += 1
            if not str(error).strip() or _raised_by_us(error.__cause__):
                wrong.append([words, platform, str(error), traceback.format_exc()[-2000:]])
            continue
        except BaseException as error:
            error.add_note(f"of {words} for {platform}")
            raise
        codes["1" if answer.refused else "0"] += 1
        said = list(map(str, answer.problems))
        if len(set(said)) != len(said):
            wrong.append([words, platform, "told twice", said])
    return {"wrong": wrong[:20], "codes": codes}


def _raised_by_us(error: BaseException | None) -> bool:
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return bool(frames) and "/kvpp_" in frames[-1].filename


if __name__ == "__main__":
    os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "HF_HUB_OFFLINE": "1"}
    print(json.dumps(answer_all(json.loads(Path(sys.argv[1]).read_text()))))
