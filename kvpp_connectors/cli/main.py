"""The `kvpp` command."""

from __future__ import annotations

import typer

from kvpp_connectors.cli.bench_broadcast import bench_broadcast
from kvpp_connectors.cli.bench_p2p import bench_p2p
from kvpp_connectors.cli.bench_pool import bench_pool
from kvpp_connectors.cli.bench_step import bench_step
from kvpp_connectors.cli.check import check
from kvpp_connectors.cli.demo import demo
from kvpp_connectors.cli.doctor import doctor
from kvpp_connectors.cli.plan import plan
from kvpp_connectors.cli.pool import pool
from kvpp_connectors.cli.proxy import proxy
from kvpp_connectors.cli.soak import soak
from kvpp_connectors.cli.trace import trace

__all__ = ["app", "main"]

app = typer.Typer(
    help="KVPP: one owner per layer, two scratch buffers, a broadcast one layer ahead.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(plan)
app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(check)
app.command()(doctor)
app.command()(demo)
app.command()(soak)
app.command()(trace)
benches = typer.Typer(help="Measure on this machine; only ratios taken in one run are of use.")
benches.command("broadcast")(bench_broadcast)
benches.command("p2p")(bench_p2p)
benches.command("pool")(bench_pool)
benches.command("step")(bench_step)
app.add_typer(benches, name="bench", no_args_is_help=True)
app.command()(proxy)
app.add_typer(pool, name="pool", no_args_is_help=True)


def main() -> None:
    """Entry point of the console script."""
    app()
