"""A run of the demo or the soak: its folder, its checkpoint, and its exit code."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from kvpp_connectors.demo.children import ChildFailed
from kvpp_connectors.demo.model import TinyModel, write_checkpoint
from kvpp_connectors.demo.report import Row
from kvpp_connectors.demo.settings import DemoSettings

__all__ = ["run_session"]


def run_session(
    run: Callable[[DemoSettings], list[Row]],
    *,
    name: str,
    layers: int,
    tp: int,
    memory_mib: int,
    logs: Path | None,
) -> int:
    """Run ``run`` with its settings; the exit code: 1 if a row is wrong or a child failed.

    Logs and results are kept in ``logs`` or a new folder, whose path is printed.
    """
    # A plain SIGTERM would end this process without stopping the engines, which have sessions of
    # their own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix=f"kvpp-{name}-")) if logs is None else logs
    folder.mkdir(parents=True, exist_ok=True)
    console.print(f"KVPP {name}: {layers} layers, TP {tp}, {memory_mib} MiB of KV memory per rank")
    started = time.monotonic()
    shape = TinyModel(num_hidden_layers=layers)
    settings = DemoSettings(folder, console, shape.vocab_size, tp, memory_mib << 20)
    write_checkpoint(settings.model, shape)
    try:
        rows = run(settings)
    except ChildFailed as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    shutil.rmtree(settings.model, ignore_errors=True)
    console.print(f"{time.monotonic() - started:.0f} s; logs and results in {folder}")
    wrong = [row.name for row in rows if row.ok is False]
    if wrong:
        console.print(f"[red]WRONG: {'; '.join(wrong)}[/red]")
        return 1
    console.print("[green]All right.[/green]")
    return 0
