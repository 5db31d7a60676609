"""`kvpp demo`: KVPP off and on in real engines, then a whole deployment of servers."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvpp_connectors.demo.report import Row
    from kvpp_connectors.demo.settings import DemoSettings

__all__ = ["Layerwise", "Logs", "demo"]

# Options of everything that runs the demo's deployment.
Layerwise = Annotated[
    bool, typer.Option("--layerwise", help="The pool saves and loads layer by layer.")
]
Logs = Annotated[
    Path | None, typer.Option(help="Folder for logs and results; kept.", show_default="temp")
]


class DemoPart(StrEnum):
    """Which half of the demo runs."""

    ALL = "all"
    ENGINES = "engines"
    SERVERS = "servers"


def demo(
    part: Annotated[
        DemoPart,
        typer.Option(help="engines: KVPP off and on. servers: pool, prefill, decode, proxy."),
    ] = DemoPart.ALL,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the tiny model.")] = 12,
    tp: Annotated[int, typer.Option(min=2, help="Tensor-parallel size of KVPP engines.")] = 2,
    memory_mib: Annotated[int, typer.Option(min=8, help="KV memory per rank, in MiB.")] = 96,
    layerwise: Layerwise = False,
    logs: Logs = None,
) -> None:
    """Show KVPP at work on this machine, and check every answer.

    Writes a tiny DeepSeek-V2 checkpoint that is sensitive to its KV cache, and prompts with shared
    prefixes that are longer than the token budget, so that chunked prefill and prefix hits happen.
    First they go through a real vLLM engine on CPU without and with KVPP under the same KV memory;
    transformers computes the same logits. Then they go through a proxy to a prefill server with
    KVPP on several ranks, which saves its KV into a Mooncake pool, and a decode server on one,
    which pulls the KV from the ranks that own it; prefill is restarted, and they go again.
    Exit code 1 if anything is unequal.
    """
    from kvpp_connectors.demo.session import run_session

    def run(settings: DemoSettings) -> list[Row]:
        return _run(replace(settings, layerwise=layerwise), part)

    code = run_session(run, name="demo", layers=layers, tp=tp, memory_mib=memory_mib, logs=logs)
    raise typer.Exit(code)


def _run(settings: DemoSettings, part: DemoPart) -> list[Row]:
    """Run one part or both, print their tables, and return the rows."""
    from kvpp_connectors.demo.comparison import compare, run_plain
    from kvpp_connectors.demo.deployment import deploy
    from kvpp_connectors.demo.report import table

    off = run_plain(settings, settings.prompts())
    rows: list[Row] = []
    if part is not DemoPart.SERVERS:
        rows += (compared := compare(settings, off).rows())
        settings.console.print(table(("KVPP off", "KVPP on"), compared))
    if part is not DemoPart.ENGINES:
        rows += (served := deploy(settings, off).rows())
        settings.console.print(table(("wave 1", "wave 2, prefill restarted"), served))
    return rows
