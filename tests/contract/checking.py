"""`kvpp check` of many launch lines in one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.contract.launches import write_memcache
from tests.contract.processes import run

__all__ = ["WIDE", "Checked", "check_all"]

WIDE = {"COLUMNS": "250", "TERM": "dumb"}

# Every line in one process: importing vLLM takes longer than all of them together. Its logging is
# left at vLLM's default, which is INFO.
CHECK_ALL = """
import json, sys
from kvpp_connectors.cli.main import app

codes = {}
for name, line in json.loads(sys.argv[1]).items():
    print("CHECK", name, flush=True)
    try:
        app(["check", *json.loads(sys.argv[2]), "--", *line])
    except SystemExit as error:
        codes[name] = error.code
    sys.stdout.flush()
print("CODES", json.dumps(codes))
"""


@dataclass(frozen=True)
class Checked:
    """What `kvpp check` printed on stdout, and its exit code."""

    code: int
    lines: list[str]


def check_all(
    lines: Mapping[str, Sequence[str]], folder: Path, *options: str
) -> dict[str, Checked]:
    """What `kvpp check` says of each line; vLLM is imported once, in a process of its own."""
    finished = run(
        [sys.executable, "-c", CHECK_ALL, json.dumps(lines), json.dumps(options)],
        folder,
        VLLM_LOGGING_LEVEL=None,
        MMC_LOCAL_CONFIG_PATH=str(write_memcache(folder)),
        **WIDE,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    text, _, codes = finished.stdout.rpartition("CODES ")
    parts = text.split("CHECK ")
    assert parts[0] == "" and len(parts) == len(lines) + 1
    return {
        name: Checked(code, part.removeprefix(name).strip().splitlines())
        for (name, code), part in zip(json.loads(codes).items(), parts[1:], strict=True)
    }
