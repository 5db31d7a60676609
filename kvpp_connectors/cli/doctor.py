"""`kvpp doctor`: whether this machine is ready for KVPP, and what KVPP would use on it."""

from __future__ import annotations

import ctypes.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points, version
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvpp_connectors.cli.gloo_ranks import RanksFailed, broadcast_costs, run_ranks
from kvpp_connectors.cli.machine import mooncakes, version_of
from kvpp_connectors.launch.modules import CONNECTOR_MODULES, MULTI_MODULE
from kvpp_connectors.plugin import has_native_kvpp

__all__ = ["Finding", "doctor", "examine", "examine_peer"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``ok`` is None where nothing can be wrong."""

    what: str
    found: str
    ok: bool | None = None
    remedy: str = ""


def doctor(
    peer: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a running prefill worker (kv_port): show what it publishes."
        ),
    ] = None,
    key_file: Annotated[
        str | None, typer.Option(help="The key shared with --peer; or KVPP_P2P_KEY.")
    ] = None,
) -> None:
    """Print versions, libraries, the platform, the hooks, and the CPU self-check.

    Exit code 1 if something that KVPP needs is missing or wrong, or the peer does not answer.
    """
    findings = list(examine() if peer is None else examine_peer(peer, key_file))
    table = Table("", "found", "", "what to do")
    for finding in findings:
        mark = {None: "", True: "[green]ok[/green]", False: "[red]WRONG[/red]"}[finding.ok]
        table.add_row(finding.what, finding.found, mark, finding.remedy)
    Console().print(table)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """All findings about this machine; each line depends on those above it."""
    yield Finding("Python", platform.python_version(), True)
    yield from _packages()
    yield from _libraries()
    yield from _vllm()
    yield _broadcast()


def examine_peer(peer: str, key_file: str | None) -> Iterator[Finding]:
    """What a prefill worker publishes in its handshake."""
    from kvpp_connectors.p2p.lease_client import describe
    from kvpp_connectors.p2p.options import P2pOptions, read_key
    from kvpp_core.errors import KvppError

    host, _, port = peer.rpartition(":")
    if not host or not port.isdecimal():
        yield Finding("--peer", peer, False, "write HOST:PORT, with the worker's kv_port")
        return
    try:
        found = describe(host, int(port), read_key(P2pOptions(key_file=key_file)))
    except KvppError as error:
        yield Finding(peer, str(error), False, "is it a prefill node, and is this its kv_port?")
        return
    yield Finding(peer, f"epoch {found.epoch}, transfer engine {found.session}", True)
    yield Finding("model", found.model)
    yield Finding("block size, kv dtype", f"{found.block_size} tokens, {found.kv_cache_dtype}")
    size = sum(region.block_bytes * region.num_blocks for region in found.regions)
    yield Finding("keeps", f"{len(found.regions)} components, {size:,} bytes")
    for region in found.regions:
        text = f"{region.num_blocks:,} blocks of {region.block_bytes:,} bytes"
        yield Finding(f"  {region.name}", text)


def _broadcast() -> Finding:
    what = "a broadcast among 2 ranks, gloo"
    try:
        return Finding(what, run_ranks(2, broadcast_costs))
    except RanksFailed as error:
        return Finding(
            what,
            str(error),
            False,
            "processes of this machine must reach one another: see that GLOO_SOCKET_IFNAME names "
            "an interface of it and that its host name resolves to an address of it",
        )


def _packages() -> Iterator[Finding]:
    for name in ("kvpp-connectors", "torch"):
        yield Finding(name, version(name), True)
    found = mooncakes()
    yield Finding(
        "Mooncake",
        ", ".join(found) or "not installed",
        True if found else None,
        "" if found else "only the KV connectors need it",
    )
    plugin = [p for p in entry_points(group="vllm.general_plugins") if p.name == "kvpp_connectors"]
    yield Finding(
        "vLLM plug-in entry point",
        plugin[0].value if plugin else "missing",
        bool(plugin),
        "" if plugin else "install this package into vLLM's environment",
    )


def _libraries() -> Iterator[Finding]:
    for library, package in (("ibverbs", "libibverbs1"), ("numa", "libnuma1")):
        path = ctypes.util.find_library(library)
        yield Finding(
            f"lib{library}",
            path or "missing",
            True if path else None,
            "" if path else f"Mooncake needs it: apt-get install {package}",
        )


def _vllm() -> Iterator[Finding]:
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        yield Finding("vLLM", str(error), False, "pip install 'kvpp-connectors[cpu]' or [cuda]")
        return
    from kvpp_connectors.vllm_api.check import vllm_version

    yield Finding("vLLM", vllm_version(), True)
    if (ascend := version_of("vllm-ascend")) is not None:
        yield Finding("vllm-ascend", ascend, True)
    if version_of("vllm") is None:
        yield Finding(
            "vllm command",
            "does not start: it asks for a distribution named vllm",
            None,
            "python -m vllm.entrypoints.openai.api_server --model MODEL takes the same options",
        )
    kind = current_platform.device_type
    if kind == "npu" and has_native_kvpp():
        yield Finding(
            "KVPP",
            "vllm-ascend's own; this package leaves the engine alone",
            True,
            "our connectors serve engines without KVPP, by kv_connector_module_path",
        )
    else:
        yield from _adapter(kind)
    yield from _connectors()
    if kind == "cpu":
        yield from _cpu()


def _adapter(kind: str) -> Iterator[Finding]:
    """KVPP's adapter to the installed vLLM: platform, worker class, hooks."""
    from kvpp_connectors.engine.workers import installed_workers
    from kvpp_connectors.vllm_api.check import (
        MADE_FOR,
        installed_hooks,
        installed_vllm,
        is_v023,
        missing_hooks,
    )
    from kvpp_connectors.vllm_api.hook import Part

    yield Finding("adapter", "vllm-ascend 0.23, on vLLM 0.23" if is_v023() else "vLLM 0.32")
    workers = installed_workers()
    served = kind in workers
    yield Finding(
        "platform",
        kind,
        True if served else None if is_v023() else False,
        ""
        if served
        else f"no KVPP here: its workers for this vLLM are for {' and '.join(workers)}",
    )
    for device, worker in workers.items():
        if not served or device == kind:
            yield Finding(f"worker class with KVPP on, {device}", worker)
    sources = installed_vllm()
    hooks = installed_hooks()
    if is_v023() and sources.text("vllm_ascend") is None:
        checked = tuple(hook for hook in hooks if Part.NPU not in hook.needed_by)
        text = f"{len(hooks) - len(checked)} more, of vllm-ascend, which is not installed"
        yield Finding("hooks not checked", text)
        hooks = checked
    missing = missing_hooks(hooks, sources)
    yield Finding(
        f"hooks ({len(hooks)})",
        "; ".join(missing) or "all found",
        not missing,
        f"this release is made for {MADE_FOR}" if missing else "",
    )


def _connectors() -> Iterator[Finding]:
    """Each connector's class in this vLLM; another plug-in may have registered its name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for name, module in {**CONNECTOR_MODULES, "MultiConnector": MULTI_MODULE}.items():
        try:
            found = getattr(import_module(module), name)
        except ImportError as error:
            yield Finding(name, str(error), False, f"this vLLM lacks what {module} needs")
            continue
        also = name in KVConnectorFactory._registry
        text = "named by kv_connector_module_path; another of this name is registered"
        yield Finding(name, f"{found.__module__}.{found.__name__}", True, text if also else "")


def _cpu() -> Iterator[Finding]:
    from kvpp_connectors.engine.cpu.profile import ROTARY_OFF

    complaint = _check_rotary(ROTARY_OFF, max_position=64)
    yield Finding(
        "rotary embedding with the CPU profile",
        complaint or "right on strided inputs",
        complaint is None,
        "" if complaint is None else "MLA models would answer wrongly: do not serve",
    )
    native = _check_rotary("+rotary_embedding", max_position=65)
    yield Finding(
        "rotary embedding without it",
        native or "right on strided inputs",
        None,
        "the CPU profile switches this op off" if native else "",
    )


def _check_rotary(op: str, max_position: int) -> str | None:
    """The CPU profile's check of a rotary embedding like DeepSeek's; what is wrong, or None.

    vLLM caches embeddings by their parameters, so each op needs its own ``max_position``.
    """
    import torch
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from kvpp_connectors.engine.cpu.rotary import check_rotary

    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all", op]))
    with set_current_vllm_config(config):
        rotary = get_rope(
            64,
            max_position=max_position,
            is_neox_style=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            dtype=torch.float32,
        )
        return check_rotary(rotary)
