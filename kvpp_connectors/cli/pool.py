"""`kvpp pool`: start a Mooncake pool on this host, inspect one, clear a namespace."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from kvpp_connectors.mooncake_admin.local_pool import LocalPool
    from kvpp_connectors.mooncake_admin.master_http import MasterHttp, Status
    from kvpp_connectors.mooncake_admin.servers import MasterAddress

__all__ = ["pool"]

pool = typer.Typer(help="The Mooncake pool of AscendStoreConnector: start or inspect one.")

_FAILED, _BAD_OPTION = 1, 2  # exit codes
_EVERY_INTERFACE = ("", "0.0.0.0", "::", "*")
_LEASES_S, _PROBE_S = 30.0, 0.5  # the master's leases last 10 s by default

Master = Annotated[
    str,
    typer.Option(envvar="MOONCAKE_MASTER", help="HOST:PORT, the engines' master_server_address."),
]
HttpPort = Annotated[int, typer.Option(min=1, max=65535, help="The master's --metrics_port.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
_MASTER, _HTTP_PORT = "127.0.0.1:50051", 9003


@pool.command()
def up(
    host: Annotated[str, typer.Option(help="Address of this host to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="For engines.")] = 50051,
    http_port: Annotated[
        int, typer.Option(min=1, max=65535, help="For metrics, `status` and `ls`.")
    ] = _HTTP_PORT,
    memory: Annotated[
        str, typer.Option(help="What a store lends to the pool: 512MB, 4GB; 0 for no store.")
    ] = "4GB",
    master_options: Annotated[
        list[str] | None, typer.Argument(help="Behind --: further options of mooncake_master.")
    ] = None,
) -> None:
    """Start mooncake_master, and a store that lends memory, and print how engines join.

    Ctrl-C or SIGTERM ends both; all objects are lost. Mooncake knows no authentication,
    and the store's data port listens on all interfaces: use a private network.
    Exit code 1: a process did not start, or ended; 2: an option is wrong.
    """
    import asyncio

    from kvpp_connectors.mooncake_admin.local_pool import LocalPool, serve
    from kvpp_connectors.mooncake_admin.servers import MasterAddress

    if host in _EVERY_INTERFACE:
        _reject_option(f"--host {host!r} means every interface; give one address of this host")
    master = MasterAddress(host, port, http_port)
    started = LocalPool(master, _memory(memory), tuple(master_options or ()))
    with _errors_as_text():
        asyncio.run(serve(started, lambda: _announce(started)))


@pool.command()
def status(
    master: Master = _MASTER, http_port: HttpPort = _HTTP_PORT, as_json: AsJson = False
) -> None:
    """Show capacity, use, hits and evictions, and the objects of each namespace.

    Reads over HTTP; renews no object's lease. Exit code 1: no answer.
    """
    import msgspec

    from kvpp_connectors.mooncake_admin.master_http import status_of

    with _errors_as_text():
        found = status_of(_http(master, http_port))
    typer.echo(msgspec.json.encode(found).decode() if as_json else "\n".join(_status_lines(found)))


@pool.command()
def ls(
    namespace: Annotated[str | None, typer.Argument(help="Only this one.")] = None,
    master: Master = _MASTER,
    http_port: HttpPort = _HTTP_PORT,
    limit: Annotated[int, typer.Option(min=0, help="Objects a namespace; 0: all.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List objects by namespace: whole blocks, layers of blocks, and commit markers.

    A namespace is kvpp1@FINGERPRINT@TOPOLOGY: engines share objects where both are equal.
    Exit code 1: no answer, or no such namespace.
    """
    from kvpp_connectors.mooncake_admin.master_http import by_namespace

    with _errors_as_text():
        http = _http(master, http_port)
        found = by_namespace(http.keys())
        if namespace is not None:
            _check_known(namespace, list(found))
            found = {namespace: found[namespace]}
        shown = {
            name: dict(list(objects.items())[: limit or None]) for name, objects in found.items()
        }
        sizes = http.sizes([key for objects in shown.values() for key in objects])
    rows = {
        name: [
            {
                "key": key,
                "kind": of.kind,
                "shard": of.shard.tag,
                "layer": of.layer.tag if of.layer else None,
                "bytes": sizes.get(key),  # None: gone meanwhile
                "block_hash": of.block_hash.hex(),
            }
            for key, of in objects.items()
        ]
        for name, objects in shown.items()
    }
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for name, objects in rows.items():
        count = len(found[name])
        typer.echo(f"{name}  ({count:,} objects)")
        for row in objects:
            layer, size = row["layer"] or "", "gone" if row["bytes"] is None else row["bytes"]
            what = f"{row['kind']:<7}{row['shard']:<8}{layer:<6}"
            typer.echo(f"  {what}{size:>12}  {row['block_hash']}")
        if len(objects) < count:
            typer.echo(f"  ... {count - len(objects):,} more (--limit 0)")
    if not rows:
        typer.echo("no objects of this connector")


@pool.command()
def clear(
    namespace: Annotated[str, typer.Argument(help="As `kvpp pool status` shows it.")],
    master: Master = _MASTER,
    http_port: HttpPort = _HTTP_PORT,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove one namespace's objects, and nothing else.

    Waits for the leases (10 s by default) of objects that an engine has just found or saved: a
    reader of a removed object could get the bytes of its successor.
    Exit code 1: no answer, no such namespace, or objects are left; 2: not confirmed.
    """
    from kvpp_connectors.mooncake_admin.master_http import by_namespace, count

    with _errors_as_text():
        http = _http(master, http_port)
        found = by_namespace(http.keys())
        _check_known(namespace, list(found))
        contents = count(http, namespace, found[namespace])
        objects = f"{len(found[namespace]):,} objects, {_size(contents.bytes)}"
        if not yes and not typer.confirm(f"Remove {namespace} ({objects}) from {http.master}?"):
            raise typer.Exit(_BAD_OPTION)
        left = _clear(http, namespace, list(found[namespace]))
    if left:
        typer.echo(
            f"{left:,} objects of {namespace} are left after {_LEASES_S:.0f} s: engines use them, "
            "or save new ones. Stop those engines, or run this again.",
            err=True,
        )
        raise typer.Exit(_FAILED)
    typer.echo(f"removed {namespace} ({objects})")


def _clear(http: MasterHttp, namespace: str, keys: list[str]) -> int:
    """Remove a namespace's objects, ``keys``, as their leases end; the number that is left."""
    from kvpp_connectors.connector.host import address_towards
    from kvpp_connectors.mooncake_admin.master_http import check_same_master
    from kvpp_connectors.pool.store.mooncake import MooncakeStore
    from kvpp_connectors.pool.store.mooncake_settings import MooncakeSettings

    settings = MooncakeSettings(master_server_address=str(http.master))
    host = address_towards(http.master.host, http.master.port)
    store = MooncakeStore(settings, host, "tcp", segment_bytes=0)
    ends = time.monotonic() + _LEASES_S
    prefix = f"{namespace}@"  # other namespaces may begin with "kvpp1@...@replicated"
    try:
        store.connect()
        check_same_master(http, store, keys)
        while True:
            store.clear(prefix)
            listed = http.keys()
            left = sum(key.startswith(prefix) for key in listed)
            if not left or time.monotonic() > ends:
                return left
            time.sleep(_PROBE_S)
    finally:
        store.close()


def _check_known(namespace: str, known: list[str]) -> None:
    """Raise KvppError if no object has this namespace."""
    from kvpp_core.errors import KvppError

    if namespace not in known:
        there = "".join(f"\n  {name}" for name in known) or " none"
        raise KvppError(f"no objects under {namespace!r}. Namespaces with objects:{there}")


def _announce(pool: LocalPool) -> None:
    config = shlex.quote(json.dumps(pool.transfer_config()))
    lent = f"a store lends {_size(pool.memory)}" if pool.memory else "nobody lends memory yet"
    typer.echo(
        f"The pool is up at {pool.master} (HTTP on port {pool.master.http_port}); {lent}. "
        f"Engines join it with\n\n--kv-transfer-config {config}\n\n"
        f"See into it: kvpp pool status --master {pool.master} "
        f"--http-port {pool.master.http_port}. Ctrl-C ends it."
    )


def _status_lines(found: Status) -> Iterator[str]:
    """`kvpp pool status` as text."""
    used, capacity = found.used_bytes, found.capacity_bytes
    share = f" ({used / capacity:.0%})" if used is not None and capacity else ""
    yield f"master    {found.master}, {found.state}"
    yield f"memory    {_size(used)} of {_size(capacity)} used{share}, from {found.stores} stores"
    yield f"objects   {found.keys:,}, of them {found.other_keys:,} not of this connector"
    yield f"lookups   {_number(found.lookups)} keys"
    hits = f"{_number(found.read_hits)} of {_number(found.reads)}"
    yield f"reads     {hits} found, {_size(found.read_bytes)}"
    yield f"evicted   {_number(found.evicted_keys)} objects, {_size(found.evicted_bytes)}"
    if found.namespaces:
        yield ""
        yield f"{'blocks':>9}{'layers':>9}{'markers':>9}{'memory':>12}  namespace"
    for each in found.namespaces:
        counts = f"{each.blocks:>9,}{each.layers:>9,}{each.markers:>9,}"
        yield f"{counts}{_size(each.bytes):>12}  {each.namespace}"


def _http(master: str, http_port: int) -> MasterHttp:
    from kvpp_connectors.mooncake_admin.master_http import MasterHttp

    return MasterHttp(_address(master, http_port))


def _address(master: str, http_port: int) -> MasterAddress:
    from kvpp_connectors.mooncake_admin.servers import MasterAddress

    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        _reject_option(f"--master {master!r} is not HOST:PORT")
    return MasterAddress(host, int(port), http_port)


def _memory(text: str) -> int:
    from kvpp_connectors.pool.store.mooncake_settings import LEAST_SEGMENT, read_bytes

    size = read_bytes(text)
    if size is None or 0 < size < LEAST_SEGMENT:
        _reject_option(f"--memory {text!r}: expected 0, or 16MB and more, such as 512MB or 4GB")
    return size


def _reject_option(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(_BAD_OPTION)


@contextmanager
def _errors_as_text() -> Iterator[None]:
    """Print a KvppError without a traceback; exit code 1."""
    from kvpp_core.errors import KvppError

    try:
        yield
    except KvppError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(_FAILED) from error


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _size(value: int | None) -> str:
    if value is None:
        return "?"
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << power:
            return f"{value / (1 << power):.1f} {unit}"
    return f"{value} bytes"
