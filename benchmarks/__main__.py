"""`python -m benchmarks`: benchmarks, soak and traces of this project."""

from __future__ import annotations

import typer

from benchmarks.broadcast import bench_broadcast
from benchmarks.capacity import bench_capacity
from benchmarks.p2p import bench_p2p
from benchmarks.pool import bench_pool
from benchmarks.report import bench_report
from benchmarks.session import bench_all
from benchmarks.soak.command import soak
from benchmarks.startup import bench_startup
from benchmarks.step import bench_step
from benchmarks.trace.command import trace

__all__ = ["app"]

app = typer.Typer(
    help="Measure on this machine; only ratios taken in one run mean anything.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("broadcast")(bench_broadcast)
app.command("step")(bench_step)
app.command("p2p")(bench_p2p)
app.command("pool")(bench_pool)
app.command("startup")(bench_startup)
app.command("capacity")(bench_capacity)
app.command("all")(bench_all)
app.command("report")(bench_report)
app.command()(soak)
app.command()(trace)

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
