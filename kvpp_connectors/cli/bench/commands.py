"""The commands of `kvpp bench`."""

from __future__ import annotations

import typer

from kvpp_connectors.cli.bench.broadcast import bench_broadcast
from kvpp_connectors.cli.bench.capacity import bench_capacity
from kvpp_connectors.cli.bench.p2p import bench_p2p
from kvpp_connectors.cli.bench.pool import bench_pool
from kvpp_connectors.cli.bench.report import bench_report
from kvpp_connectors.cli.bench.session import bench_all
from kvpp_connectors.cli.bench.startup import bench_startup
from kvpp_connectors.cli.bench.step import bench_step

__all__ = ["benches"]

benches = typer.Typer(help="Measure on this machine; only ratios taken in one run are of use.")
benches.command("broadcast")(bench_broadcast)
benches.command("step")(bench_step)
benches.command("p2p")(bench_p2p)
benches.command("pool")(bench_pool)
benches.command("startup")(bench_startup)
benches.command("capacity")(bench_capacity)
benches.command("all")(bench_all)
benches.command("report")(bench_report)
