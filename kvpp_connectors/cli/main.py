"""The `kvpp` command."""

from __future__ import annotations

import typer

from kvpp_connectors.cli.check import check
from kvpp_connectors.cli.demo import demo
from kvpp_connectors.cli.doctor import doctor
from kvpp_connectors.cli.plan import plan
from kvpp_connectors.cli.pool import pool
from kvpp_connectors.cli.proxy import proxy

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
app.command()(proxy)
app.add_typer(pool, name="pool", no_args_is_help=True)


def main() -> None:
    """Entry point of the console script."""
    app()
