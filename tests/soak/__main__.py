"""Random traffic with KVPP for some minutes, then the same without, compared to the last bit:

python -m tests.soak [--minutes 10] [--seed 0] [--rounds N] [--fault NAME]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tests.conftest  # noqa: F401  sets the environment before vLLM is imported
from tests.engine.harness import Engine
from tests.soak.rounds import Round, compare, run_round, soak_engine, write_model

__all__ = ["FAULTS", "main"]

FAULTS: dict[str, Callable[[Engine], object]] = {
    "no-broadcasts": lambda engine: engine.call("fault_stop_broadcasts"),
    "no-indexer": lambda engine: engine.call("fault_stop_component", ".indexer.k_cache"),
}


def main() -> int:
    """1 when any output is wrong or anything is left behind."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="of traffic with KVPP on")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--rounds", type=int, help="this many rounds, however long they take")
    parser.add_argument("--fault", choices=FAULTS, help="break the last round: it must be wrong")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvpp-soak-") as folder:
        model = write_model(Path(folder))
        with soak_engine(model, kvpp=True) as engine:
            ours = list(_rounds(engine, options))
            modes = engine.call("kvpp_stats")[0]["broadcasts"]
        with soak_engine(model, kvpp=False) as engine:
            theirs = [run_round(engine, done.seed) for done in ours]
    report = compare(ours, theirs)
    print(report)
    print("broadcasts: " + ", ".join(f"{count:,} {mode}" for mode, count in modes.items()))
    return int(bool(report.wrong))


def _rounds(engine: Engine, options: argparse.Namespace) -> Iterator[Round]:
    """Rounds with growing seeds until the time is up; with a fault, one more."""
    started, seed = time.monotonic(), options.seed
    while _goes_on(seed - options.seed, time.monotonic() - started, options):
        yield run_round(engine, seed)
        seed += 1
        minutes = (time.monotonic() - started) / 60
        print(f"{minutes:5.1f} min: {seed - options.seed} rounds", file=sys.stderr, flush=True)
    if options.fault:
        FAULTS[options.fault](engine)
        yield run_round(engine, seed)


def _goes_on(rounds: int, seconds: float, options: argparse.Namespace) -> bool:
    if options.rounds is not None:
        return rounds < int(options.rounds)
    return seconds < float(options.minutes) * 60


if __name__ == "__main__":
    sys.exit(main())
