"""`benchmarks trace`: a timeline of each layer in the demo's engine, as a Chrome trace."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.timeouts import LOOKUPS, MOONCAKE
from kvpp_connectors.cli.demo import Layerwise, Logs
from kvpp_core.policy import BroadcastPolicy, DecodePolicy
from kvpp_core.trace import Lane

if TYPE_CHECKING:
    from benchmarks.trace.figures import TracedStep
    from benchmarks.trace.traced import TraceJob, TraceResult
    from kvpp_core.trace import Recording

__all__ = ["trace", "with_long_timeouts"]

_ANSWER_TOKENS = 9  # the first comes with the last chunk, then a decode step each
_POOL_BYTES = 512 << 20


def trace(
    out: Annotated[Path, typer.Argument(help="JSON file; an existing one is replaced.")],
    broadcast: Annotated[
        BroadcastPolicy, typer.Option(help="As in additional_config.kvpp.")
    ] = BroadcastPolicy.AUTO,
    decode: Annotated[
        DecodePolicy, typer.Option(help="As in additional_config.kvpp.")
    ] = DecodePolicy.BROADCAST,
    pool: Annotated[bool, typer.Option("--pool", help="With a pool of whole blocks.")] = False,
    layerwise: Layerwise = False,
    steps: Annotated[int, typer.Option(min=1, help="Keep the last ones.")] = 128,
    prompts: Annotated[int, typer.Option(min=1, help="One after the other.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Of each prompt.")] = 1000,
    chunk: Annotated[int, typer.Option(min=16, help="Prompt tokens in one step.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the tiny model.")] = 12,
    tp: Annotated[int, typer.Option(min=2, help="Tensor-parallel size.")] = 2,
    memory_mib: Annotated[int, typer.Option(min=8, help="KV memory per rank, in MiB.")] = 96,
    picture: Annotated[
        Path | None, typer.Option(help="SVG file for a picture of one step.")
    ] = None,
    logs: Logs = None,
) -> None:
    """Record a run of the demo's KVPP engine: what each rank computes, waits for and sends.

    Prompts are computed in chunks, one after the other, and answered. OUT opens in
    ui.perfetto.dev or chrome://tracing: a process for each rank, a row each for compute, wait,
    broadcast, exchange, load and save. Tables show medians by layer and the parts of the waits.
    With --pool or --layerwise the prompts are saved into a pool and then loaded from it.
    docs/performance.md.
    """
    from benchmarks.trace.traced import TraceJob
    from kvpp_connectors.demo.children import ChildFailed

    for option, path in (("OUT", out), ("--picture", picture)):
        _check_place(option, path)
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="kvpp-trace-")) if logs is None else logs
    folder.mkdir(parents=True, exist_ok=True)
    job = TraceJob(
        model=str(folder / "model"),
        broadcast=broadcast.value,
        decode=decode.value,
        transfer=None,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        chunk=chunk,
        answer_tokens=_ANSWER_TOKENS,
        tensor_parallel_size=tp,
        kv_cache_memory_bytes=memory_mib << 20,
        kept_steps=steps,
    )
    try:
        result = _record(job, folder, layers, pool=pool, layerwise=layerwise, console=console)
    except ChildFailed as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        raise typer.Exit(1) from None
    _report(result, console, out, picture, f"broadcast {broadcast.value}, {layers} layers, TP {tp}")
    if logs is None:
        shutil.rmtree(folder, ignore_errors=True)


def _check_place(option: str, path: Path | None) -> None:
    """Check before minutes are spent that ``path`` can be written.

    Raises:
        typer.BadParameter: nothing can be written there.
    """
    if path is None:
        return
    if path.is_dir():
        raise typer.BadParameter(
            f"{path} is a folder; expected the name of a file", param_hint=option
        )
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(
            f"there is no folder {path.absolute().parent}; make it, or write elsewhere",
            param_hint=option,
        )
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"{path} may not be written", param_hint=option)


def _record(
    job: TraceJob, folder: Path, layers: int, *, pool: bool, layerwise: bool, console: Console
) -> TraceResult:
    """Run the job in a process of its own, with a pool beside it for ``pool`` or ``layerwise``.

    Raises:
        ChildFailed: the engine or the pool failed.
    """
    from benchmarks.trace.traced import TraceResult
    from kvpp_connectors.demo.children import run_module
    from kvpp_connectors.demo.model import TinyModel, write_checkpoint
    from kvpp_connectors.demo.pool import serving_pool
    from kvpp_connectors.demo.settings import ENVIRONMENT
    from kvpp_connectors.mooncake_admin.servers import STORE_ENVIRONMENT

    longest = job.prompt_tokens + job.answer_tokens + 1
    shape = TinyModel(num_hidden_layers=layers, max_position_embeddings=longest)
    write_checkpoint(Path(job.model), shape)
    source, target = folder / "trace-job.json", folder / "trace-result.json"
    with ExitStack() as stack:
        if pool or layerwise:
            store = stack.enter_context(serving_pool(folder, _POOL_BYTES))
            transfer = with_long_timeouts(store.transfer_config(), layerwise=layerwise)
            job = job.model_copy(update={"transfer": transfer})
        source.write_text(job.model_dump_json())
        run_module(
            "benchmarks.trace.traced",
            [str(source), str(target)],
            title="the traced engine",
            log=folder / "trace.log",
            environment={**MOONCAKE, **ENVIRONMENT, **STORE_ENVIRONMENT},
            console=console,
        )
    shutil.rmtree(job.model, ignore_errors=True)
    return TraceResult.model_validate_json(target.read_text())


def with_long_timeouts(transfer: dict[str, Any], *, layerwise: bool) -> dict[str, Any]:
    """A pool's kv_transfer_config with lookups that wait even on a busy machine."""
    extra = transfer["kv_connector_extra_config"]
    extra = {**extra, **LOOKUPS, "use_layerwise": layerwise}
    return {**transfer, "kv_connector_extra_config": extra}


def _report(
    result: TraceResult, console: Console, out: Path, picture: Path | None, what: str
) -> None:
    from benchmarks.trace.events import chrome_trace
    from benchmarks.trace.figures import by_kind
    from benchmarks.trace.picture import draw

    recordings = [rank.recording for rank in result.ranks]
    out.write_text(json.dumps(chrome_trace(recordings)))
    kinds = by_kind(recordings)
    for kind, steps in kinds.items():
        console.print(_layer_table(kind, steps))
    if kinds:
        console.print(_rank_table(kinds))
    exchanging = by_kind(recordings, Lane.EXCHANGE)
    for kind, steps in exchanging.items():
        console.print(_exchange_table(kind, steps))
    kept = recordings[0].steps
    dropped = sum(recording.dropped for recording in recordings)
    console.print(
        f"{len(kept)} of {kept[-1].number + 1} steps kept, {dropped} spans dropped; trace in {out}"
    )
    if failed := sum(map(_failed, recordings)):
        console.print(
            f"[red]{failed} blocks of a layer were not loaded or saved: the pool did not answer in "
            "time. Try again when the machine is less busy.[/red]"
        )
    shown_kinds = exchanging or _loading_first(kinds)
    if picture is not None and shown_kinds:
        kind, steps = next(iter(shown_kinds.items()))
        shown = sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]
        picture.write_text(draw(shown, f"{kind}, step {shown.number}: {what}"))
        console.print(f"picture of step {shown.number} in {picture}")


def _failed(recording: Recording) -> int:
    """Blocks of single layers that were not saved or not loaded."""
    spans = (span for step in recording.steps for span in step.spans)
    return sum(int(span.facts.get("failed", 0)) for span in spans)


def _loading_first(kinds: dict[str, list[TracedStep]]) -> dict[str, list[TracedStep]]:
    """Kinds of steps that load first, since they show most; prefill stays before decode."""
    return dict(sorted(kinds.items(), key=lambda item: "loads" not in item[0]))


def _layer_table(kind: str, steps: Sequence[TracedStep]) -> Table:
    from benchmarks.trace.figures import layers

    heads = (
        *("layer", "owner", "compute", "broadcast", "= pack", "+ transport", "+ unpack"),
        *("owner waits", "others wait"),
    )
    table = Table(*heads, title=f"{kind}: medians of {len(steps)} steps, ms")
    for f in layers(steps):
        times = (
            *(f.compute, f.broadcast, f.pack, f.transport, f.unpack),
            *(f.owner_waits, f.others_wait),
        )
        table.add_row(str(f.layer), f"rank {f.owner}", *(f"{t * 1e3:.2f}" for t in times))
    return table


def _exchange_table(kind: str, steps: Sequence[TracedStep]) -> Table:
    from benchmarks.trace.figures import exchanges

    heads = ("layer", "owner", "queries", "attention", "results", "from call to last result")
    title = f"{kind}, at the owner: medians of {len(steps)} steps, ms"
    table = Table(*heads, title=title)
    for f in exchanges(steps):
        times = (f.queries, f.attention, f.results, f.whole)
        table.add_row(str(f.layer), f"rank {f.owner}", *(f"{t * 1e3:.2f}" for t in times))
    return table


def _rank_table(kinds: dict[str, list[TracedStep]]) -> Table:
    from benchmarks.trace.figures import PARTS, ranks

    heads = ("step", "rank", "ms", "waits, ms", "waits", "launches", *(f"for {p}" for p in PARTS))
    table = Table(*heads, title="What a step waits for: share of the step, and shares of the wait")
    for kind, steps in kinds.items():
        for f in ranks(steps):
            table.add_row(
                *(kind, str(f.rank), f"{f.step * 1e3:.1f}", f"{f.waits * 1e3:.1f}"),
                *(f"{f.share:.0%}", f"{f.launch:.0%}"),
                *(f"{f.parts[part]:.0%}" for part in PARTS),
            )
    return table
