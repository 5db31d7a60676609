"""`benchmarks startup`: the plug-in's cost where it is not used, and the start of engines.

The plug-in is imported in fresh interpreters, against empty ones; and registered in processes that
have imported vLLM, as every process of vLLM does. Engines of the demo's model start with KVPP off
and on in turns, timed from the start of their process until they are ready; earlier processes have
brought vLLM's files into the page cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.base import AsJson, AsMarkdown, Figures, Table, conclude
from benchmarks.engines import SWITCHES, bare_engine
from benchmarks.interleaved import Spread, interleave, medians, ratio, spread
from kvpp_connectors.demo.settings import ENVIRONMENT

__all__ = ["EngineStart", "PlugInCost", "StartupFigures", "bench_startup"]

RANKS = 2
_CHILD_S = 300.0
_EMPTY, _PLUG_IN = "pass", "import kvpp_connectors.plugin"
_REGISTER = """
import time, vllm.platforms
vllm.platforms.current_platform  # found at the first look, with or without us
started = time.perf_counter()
from kvpp_connectors.plugin import register
register()
print(time.perf_counter() - started)
"""


@dataclass(frozen=True, slots=True)
class PlugInCost:
    """Median seconds, and the seconds that the plug-in adds within a turn."""

    empty: float  # an interpreter that does nothing, from its start to its end
    imported: float  # one that imports the plug-in
    added: Spread
    register: Spread  # import and registration in a process that has imported vLLM


@dataclass(frozen=True, slots=True)
class EngineStart:
    """Median seconds from the start of the process until the engine is ready."""

    off: float
    on: float
    on_to_off: Spread


@dataclass(frozen=True, slots=True)
class StartupFigures(Figures):
    """The plug-in's cost, and starts of engines unless there are none."""

    plug_in: PlugInCost
    engines: list[EngineStart]

    def tables(self) -> list[Table]:
        p = self.plug_in
        costs = (f"{p.empty * 1e3:.1f}", f"{p.imported * 1e3:.1f}", _ms(p.added), _ms(p.register))
        return [
            Table(
                "The plug-in in a process that does not use it, ms",
                ("empty interpreter", "importing the plug-in", "added", "registering it in vLLM"),
                (costs,),
            ),
            *(
                Table(
                    f"From process to ready engine, the demo's model, TP{RANKS}",
                    ("off, s", "on, s", "on / off"),
                    ((f"{e.off:.1f}", f"{e.on:.1f}", str(e.on_to_off)),),
                )
                for e in self.engines
            ),
        ]

    def summary(self) -> str:
        ready = "".join(f"; engine ready, on / off {e.on_to_off}" for e in self.engines)
        return f"plug-in {_ms(self.plug_in.added)} ms{ready}"


def bench_startup(
    repeats: Annotated[int, typer.Option(min=3, help="Empty interpreters.")] = 21,
    processes: Annotated[int, typer.Option(min=1, help="Processes with vLLM.")] = 3,
    starts: Annotated[
        int, typer.Option(min=0, help="Starts of each engine, of three processes each.")
    ] = 3,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Time the plug-in's import where it is not used, and engines' starts, KVPP off and on."""
    conclude(
        "startup",
        lambda: StartupFigures(
            _time_plug_in(repeats, processes), [_time_engines(starts)] if starts else []
        ),
        as_json,
        as_markdown,
    )


def _time_plug_in(repeats: int, processes: int) -> PlugInCost:
    turns = interleave({"empty": lambda: _run(_EMPTY), "imported": lambda: _run(_PLUG_IN)}, repeats)
    registered = interleave({"register": lambda: _run(_REGISTER)}, processes)
    return PlugInCost(
        added=spread(turn["imported"] - turn["empty"] for turn in turns),
        register=spread(turn["register"] for turn in registered),
        **medians(turns),
    )


def _run(program: str) -> float | None:
    """Run ``program`` in a fresh interpreter; the seconds that it prints, if any."""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=_CHILD_S,
        check=True,
    )
    return float(ended.stdout) if ended.stdout else None


def _time_engines(starts: int) -> EngineStart:
    from kvpp_connectors.demo.model import write_checkpoint

    with tempfile.TemporaryDirectory(prefix="kvpp-bench-") as folder:
        model = str(write_checkpoint(Path(folder) / "model"))
        turns = interleave(
            {way: partial(_start, model, way) for way in SWITCHES}, starts, warm_ups=0
        )
    return EngineStart(**medians(turns), on_to_off=ratio(turns, "on", "off"))


def _start(model: str, way: str) -> float:
    """Seconds until the engine is ready, without its shutdown."""
    started = time.perf_counter()
    with bare_engine(way, _is_ready, model, RANKS, 64 << 20) as engine:
        engine.call(None)
        return time.perf_counter() - started


def _is_ready(llm: Any, _: None) -> bool:
    """Answer True once the engine has started."""
    return llm is not None


def _ms(seconds: Spread) -> str:
    return f"{seconds.median * 1e3:.1f} ({seconds.low * 1e3:.1f}–{seconds.high * 1e3:.1f})"
