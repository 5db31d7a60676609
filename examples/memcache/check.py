"""Check MemCache on a machine with an NPU, through this project's store.

    python examples/memcache/check.py                        # NPU 0 saves and loads
    python examples/memcache/check.py --second-device 1      # and NPU 1, in another process, loads
    python examples/memcache/check.py --dry                  # without an NPU: lookups alone

It starts a MetaService (or uses the one of --config), lends memory to the pool, and moves blocks of
known bytes from caches into the pool and back into poisoned caches, as an engine does. It prints a
line per step; exit code 0 if all were as expected. See docs/pool.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from kvpp_connectors.connector.ports import reserved_ports
from kvpp_connectors.pool.store.base import Buffer, PoolUnavailable, StoreOutcome, StoreResult
from kvpp_connectors.pool.store.memcache import MemCacheStore, MemoryKind
from kvpp_connectors.pool.store.memcache_settings import CONFIG_VARIABLE
from kvpp_core.errors import KvppError

POISON = 0xEE
START_S = 30.0
SAVED = "SAVED"  # the saver's last line: its objects are there until its input ends


class Report:
    """Prints steps as lines, and counts failed ones."""

    def __init__(self) -> None:
        self.failed = 0

    def step(self, good: bool, what: str, seen: str) -> None:
        """Print one step and what was seen."""
        self.failed += not good
        print(f"{'ok    ' if good else 'FAILED'}  {what:<58} {seen}", flush=True)


class Caches:
    """One cache a layer, [blocks, bytes] uint8, as an engine has them."""

    def __init__(self, device: str, blocks: int, layers: int, row: int) -> None:
        self.layers = [
            torch.full((blocks, row), POISON, dtype=torch.uint8, device=device)
            for _ in range(layers)
        ]

    def fill(self) -> None:
        """Fill each row with bytes that no other row has."""
        for layer, cache in enumerate(self.layers):
            cache.copy_(_pattern(layer, *cache.shape))
        _wait(self.layers[0])

    def wrong_rows(self) -> int:
        """Rows that do not hold what fill() writes."""
        _wait(self.layers[0])
        return sum(
            int((cache.cpu() != _pattern(layer, *cache.shape)).any(dim=1).sum())
            for layer, cache in enumerate(self.layers)
        )

    def buffers(self, layers: int) -> list[Buffer]:
        """The buffers of all blocks: their rows in the first ``layers`` layers."""
        blocks, row = self.layers[0].shape
        return [
            Buffer(tuple(c[b].data_ptr() for c in self.layers[:layers]), (row,) * layers)
            for b in range(blocks)
        ]


def _pattern(layer: int, blocks: int, row: int) -> torch.Tensor:
    starts = torch.arange(blocks)[:, None] * 17 + layer * 29
    return ((starts + torch.arange(row)[None, :] * 31) % 251).to(torch.uint8)


def _wait(cache: torch.Tensor) -> None:
    if cache.device.type == "npu":
        torch.npu.synchronize()


def save(backend: MemCacheStore, keys: Sequence[str], caches: Caches, report: Report) -> None:
    """Save blocks into the pool, twice; the second time they are there."""
    caches.fill()
    buffers = caches.buffers(len(caches.layers))
    report.step(not any(backend.exist(keys)), "a lookup before the save finds nothing", "")
    _moved(report, "save", StoreResult.STORED, buffers, lambda: backend.put(keys, buffers))
    found = sum(backend.exist(keys))
    report.step(found == len(keys), "a lookup after the save finds all", f"{found} blocks")
    again = lambda: backend.put(keys, buffers)  # noqa: E731
    _moved(report, "the same save again", StoreResult.ALREADY_THERE, buffers, again)


def load(backend: MemCacheStore, keys: Sequence[str], caches: Caches, report: Report) -> None:
    """Load blocks into poisoned caches, byte for byte; loads that must fail report why."""
    buffers = caches.buffers(len(caches.layers))
    _moved(report, "load", StoreResult.LOADED, buffers, lambda: backend.get(keys, buffers))
    wrong = caches.wrong_rows()
    report.step(wrong == 0, "the loaded bytes are those that were saved", f"{wrong} wrong rows")
    one = buffers[:1]
    absent = lambda: backend.get([keys[0] + "-absent"], one)  # noqa: E731
    _moved(report, "load of what was never saved", StoreResult.MISSING, one, absent)
    short = caches.buffers(len(caches.layers) - 1)[:1]
    _moved(
        report,
        "load into a buffer that is too short",
        StoreResult.WRONG_LENGTH,
        short,
        lambda: backend.get(keys[:1], short),
    )


def _moved(
    report: Report,
    what: str,
    expected: StoreResult,
    buffers: Sequence[Buffer],
    move: Callable[[], list[StoreOutcome]],
) -> None:
    started = time.perf_counter()
    outcomes = move()
    took_s = time.perf_counter() - started
    seen = sorted({str(outcome) for outcome in outcomes})
    size = sum(buffer.total for buffer in buffers)
    rate = f", {size / took_s / 2**20:,.0f} MiB/s" if expected in _MOVES else ""
    good = all(outcome.result is expected for outcome in outcomes)
    report.step(good, f"{what}: {expected}", f"{len(outcomes)} x {'; '.join(seen)}{rate}")


_MOVES = (StoreResult.STORED, StoreResult.LOADED)


def scheduler(options: argparse.Namespace) -> Report:
    """A process that only looks up, as vLLM's scheduler does."""
    report = Report()
    backend = MemCacheStore(MemoryKind.HOST, 0, moves_data=False)
    backend.connect()
    found = sum(backend.exist(options.keys))
    report.step(
        found == options.expect, "a scheduler's lookup", f"{found} of {len(options.keys)} blocks"
    )
    backend.close()
    return report


def worker(options: argparse.Namespace) -> Report:
    """A process with an NPU: saves and loads, or only loads what another has saved."""
    report = Report()
    if options.memory == "npu":
        import torch_npu  # noqa: F401 -- gives torch its npu device

        torch.npu.set_device(options.device)
    place = f"npu:{options.device}" if options.memory == "npu" else "cpu"
    kind = MemoryKind.DEVICE if options.memory == "npu" else MemoryKind.HOST
    backend = MemCacheStore(kind, options.device, moves_data=True)
    shape = (place, options.blocks, options.layers, options.row_bytes)
    source, target = Caches(*shape), Caches(*shape)
    for cache in (*source.layers, *target.layers):
        backend.register(cache.data_ptr(), cache.numel())
    backend.connect()
    report.step(True, f"a worker's client starts on device {options.device}", options.memory)
    if options.role == "saver":
        save(backend, options.keys, source, report)
    load(backend, options.keys, target, report)
    if options.role == "saver":
        print(SAVED, flush=True)
        sys.stdin.read()
    backend.close()
    return report


@contextmanager
def metaservice(folder: Path, options: argparse.Namespace) -> Iterator[Path]:
    """A MetaService on loopback while the block runs; the path of its clients' configuration."""
    with reserved_ports(3) as ports:
        yield from _serving(folder, options, *ports)


def _serving(
    folder: Path, options: argparse.Namespace, meta: int, store: int, metrics: int
) -> Iterator[Path]:
    (folder / "mmc-meta.conf").write_text(
        f"ock.mmc.meta_service_url = tcp://127.0.0.1:{meta}\n"
        f"ock.mmc.meta_service.config_store_url = tcp://127.0.0.1:{store}\n"
        f"ock.mmc.meta_service.metrics_url = http://127.0.0.1:{metrics}\n"
        f"ock.mmc.log_path = {folder}\nock.mmc.log_level = error\n"
    )
    local = folder / "mmc-local.conf"
    local.write_text(
        f"ock.mmc.meta_service_url = tcp://127.0.0.1:{meta}\n"
        f"ock.mmc.local_service.config_store_url = tcp://127.0.0.1:{store}\n"
        f"ock.mmc.local_service.protocol = {options.protocol}\n"
        "ock.mmc.local_service.world_size = 16\n"
        f"ock.mmc.local_service.dram.size = {options.lend}\n"
        "ock.mmc.log_level = error\n"
    )
    log = folder / "metaservice.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "from memcache_hybrid import MetaService; MetaService.main()"],
            env=os.environ | {"MMC_META_CONFIG_PATH": str(folder / "mmc-meta.conf")},
            cwd=folder,
            stdout=output,
            stderr=output,
        )
    try:
        ends = time.monotonic() + START_S
        while not _listens(meta):
            if process.poll() is not None or time.monotonic() > ends:
                said = log.read_text(errors="replace")[-2000:]
                raise SystemExit(
                    f"{said}\nFAILED  MetaService did not start. Is memcache-hybrid installed? "
                    "Does another one run here? A machine has one alone: give its clients' file "
                    "by --config."
                )
            time.sleep(0.05)
        yield local
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def run(options: argparse.Namespace) -> int:
    """Start the processes one after the other; the number of failed ones."""
    keys = [f"kvpp1@check@{os.getpid()}@{block}" for block in range(options.blocks)]
    with ExitStack() as stack:
        config = options.config
        if config is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpp-memcache-")))
            config = stack.enter_context(metaservice(folder, options))
        print(f"        configuration: {config}", flush=True)

        def child(role: str, device: int, expect: int = 0) -> subprocess.Popen[str]:
            own = {"role": role, "device": device, "expect": expect, "keys": keys}
            return subprocess.Popen(
                [sys.executable, __file__, "--child", json.dumps(vars(options) | own, default=str)],
                env=os.environ | {CONFIG_VARIABLE: str(config)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

        failed = _end_child(child("scheduler", 0), options)
        if options.dry or failed:
            return failed
        saver = child("saver", options.device)
        stack.callback(saver.kill)
        if _waits(saver, options):
            failed += _end_child(child("scheduler", 0, expect=options.blocks), options)
            if options.second_device is not None:
                failed += _end_child(child("loader", options.second_device), options)
        return failed + _end_child(saver, options)


def _waits(process: subprocess.Popen[str], options: argparse.Namespace) -> bool:
    """Print a child's steps until it holds its saved objects (True) or ends (False)."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(SAVED):
            return True
        if options.verbose or line.startswith(("ok ", "FAILED ")):
            print(line, end="", flush=True)
    return False


def _end_child(process: subprocess.Popen[str], options: argparse.Namespace) -> int:
    """End a child and print its steps; 1 if one of them failed."""
    assert process.stdin is not None
    process.stdin.close()
    _waits(process, options)
    return int(process.wait() != 0)


def as_child(options: argparse.Namespace) -> int:
    """One process of the check."""
    try:
        report = scheduler(options) if options.role == "scheduler" else worker(options)
    except (PoolUnavailable, KvppError) as error:
        report = Report()
        report.step(False, f"{options.role}", str(error))
    return int(report.failed > 0)


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    assert __doc__ is not None
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--dry", action="store_true", help="no NPU: MetaService and lookups alone")
    made.add_argument("--device", type=int, default=0, help="NPU of the process that saves")
    made.add_argument("--second-device", type=int, help="NPU of a process that loads the same")
    made.add_argument("--memory", choices=["npu", "host"], default="npu", help="of the caches")
    made.add_argument("--protocol", default="device_sdma", help="device_rdma, host_tcp, ...")
    made.add_argument("--lend", default="1GB", help="memory that each worker lends to the pool")
    made.add_argument("--config", type=Path, help="mmc-local.conf of a MetaService that runs")
    made.add_argument("--blocks", type=int, default=32)
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--row-bytes", type=int, default=128 << 10, help="of a block in one layer")
    made.add_argument("--verbose", action="store_true", help="MemCache's own log lines, too")
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made


def main() -> int:
    """Run the check; the exit code."""
    options = parser().parse_args()
    if options.child:
        return as_child(argparse.Namespace(**json.loads(options.child)))
    failed = run(options)
    again = "" if options.verbose else "; --verbose shows MemCache's own log lines"
    print("all as expected" if not failed else f"{failed} processes failed{again}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
