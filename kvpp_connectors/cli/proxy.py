"""`kvpp proxy`: one address in front of prefill and decode engines."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Annotated

import typer

__all__ = ["proxy"]


def proxy(
    prefill: Annotated[list[str], typer.Option(help="URL of a prefill engine; repeatable.")],
    decode: Annotated[list[str], typer.Option(help="URL of a decode engine; repeatable.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    connect_timeout: Annotated[float, typer.Option(help="Seconds to connect to a node.")] = 5.0,
    prefill_timeout: Annotated[float, typer.Option(help="Seconds for prefill's answer.")] = 600.0,
    decode_first_byte_timeout: Annotated[
        float, typer.Option(help="Seconds until the first token of a streamed answer.")
    ] = 300.0,
    decode_timeout: Annotated[
        float, typer.Option(help="Seconds for the whole of an answer that is not streamed.")
    ] = 1800.0,
    stream_idle_timeout: Annotated[
        float, typer.Option(help="Seconds between two chunks of a stream.")
    ] = 120.0,
    client_timeout: Annotated[
        float, typer.Option(help="Seconds for a client to send its body or take a chunk.")
    ] = 60.0,
    probe_interval: Annotated[float, typer.Option(help="Seconds between health probes.")] = 5.0,
    probe_timeout: Annotated[float, typer.Option(help="Seconds for the answer to one.")] = 5.0,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM.")
    ] = 30.0,
    retries: Annotated[int, typer.Option(min=0, help="Further tries on other nodes.")] = 2,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Largest body of a request, MiB.")] = 64,
    key_file: Annotated[
        str | None,
        typer.Option(help="The key that all nodes share, to release with; or KVPP_P2P_KEY."),
    ] = None,
) -> None:
    """Serve the OpenAI API from separate prefill and decode engines.

    Works with MooncakeConnectorV2 and every connector whose prefill answers with
    kv_transfer_params for decode (NIXL, vllm-ascend). Ends on SIGTERM or Ctrl-C after
    the running requests. Exit code 1: cannot listen; 2: an option is wrong.
    """
    from kvpp_connectors.p2p.lease_client import LeaseReleaser
    from kvpp_connectors.p2p.options import P2pOptions, read_key
    from kvpp_connectors.proxy.app import serve
    from kvpp_connectors.proxy.options import ProxyOptions
    from kvpp_core.errors import KvppError

    try:
        options = ProxyOptions(
            prefill=tuple(prefill),
            decode=tuple(decode),
            connect_timeout=connect_timeout,
            prefill_timeout=prefill_timeout,
            decode_first_byte_timeout=decode_first_byte_timeout,
            decode_timeout=decode_timeout,
            stream_idle_timeout=stream_idle_timeout,
            client_timeout=client_timeout,
            probe_interval=probe_interval,
            probe_timeout=probe_timeout,
            shutdown_timeout=shutdown_timeout,
            retries=retries,
            max_body_bytes=max_body_mib << 20,
        )
        releaser = LeaseReleaser(read_key(P2pOptions(key_file=key_file)))
    except (ValueError, KvppError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(message)s")
    _allow_many_connections()
    try:
        asyncio.run(serve(options, host, port, releaser))
    except OSError as error:
        typer.echo(f"cannot listen on {host}:{port}: {error}", err=True)
        raise typer.Exit(1) from error


def _allow_many_connections() -> None:
    """Raise the limit of open files: a request takes two sockets, and shells often allow 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
