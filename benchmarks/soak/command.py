"""`benchmarks soak`: mixed traffic through a deployment whose engines are killed meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvpp_connectors.cli.demo import Layerwise, Logs

if TYPE_CHECKING:
    from kvpp_connectors.demo.report import Row
    from kvpp_connectors.demo.settings import DemoSettings

__all__ = ["soak"]


def soak(
    minutes: Annotated[
        float,
        typer.Option(min=0.1, help="Of traffic, to the end of a round: at least three."),
    ] = 10.0,
    clients: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 12,
    seed: Annotated[int, typer.Option(help="Of the prompts, and of when clients leave.")] = 0,
    layerwise: Layerwise = False,
    logs: Logs = None,
) -> None:
    """Run the demo's deployment under mixed traffic, and check answers and resources.

    A plain engine answers first. Then clients send the same prompts through the proxy; a quarter of
    them leave early, KV memory and pool are too small, and prefill and decode are killed, stopped
    and frozen in turn. Exit code 1: an answer is not the plain engine's; a request failed while
    nothing was disturbed, or took too long; KV blocks are held without requests; or a server's
    files, threads, mappings or memory grow.
    """
    from benchmarks.soak.run import KV_MIB, soak
    from kvpp_connectors.demo.session import run_session

    def run(settings: DemoSettings) -> list[Row]:
        return soak(replace(settings, layerwise=layerwise), minutes, clients, seed)

    code = run_session(run, name="soak", layers=12, tp=2, memory_mib=KV_MIB, logs=logs)
    raise typer.Exit(code)
