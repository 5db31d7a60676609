"""`kvpp plan`: how many tokens fit with KVPP off and on, before any engine is started.

Reads the options and prints the plan; its figures are made in capacity_plan.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvpp_connectors.cli.capacity_plan import (
    MOST,
    Plan,
    PlanRequest,
    StagePlan,
    make_plan,
    naming_option,
    span,
)
from kvpp_connectors.cli.model_shapes import (
    AUTO,
    INDEXER_LAYOUTS,
    MAIN_LAYOUTS,
    NO_INDEXER,
    ModelShape,
    default_layer_split,
    read_model_shape,
)
from kvpp_core.errors import KvppError, PlanError
from kvpp_core.layout import ScratchPolicy
from kvpp_core.ownership import OwnershipPolicy

__all__ = ["plan"]

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_POLICIES = [policy.value for policy in OwnershipPolicy]
_SCRATCH = [policy.value for policy in ScratchPolicy]
_BAD_OPTION = 2  # exit code
_INT = "INTEGER"  # parsed here, so that all options have the same kind of error
_MIN_WIDTH = 100  # columns: enough for the table where the output is not a terminal


def plan(
    model: Annotated[
        Path, typer.Option(help="config.json of the model, or the local folder that holds it.")
    ],
    tp: Annotated[str, typer.Option(metavar=_INT, help="Tensor parallel size.")] = "1",
    pp: Annotated[str, typer.Option(metavar=_INT, help="Pipeline parallel size.")] = "1",
    pcp: Annotated[
        str, typer.Option(metavar=_INT, help="Prefill context parallel size. KVPP group: TP x PCP.")
    ] = "1",
    layer_split: Annotated[
        str | None,
        typer.Option(
            help="Layers of each PP stage, such as 38,40. Default: vLLM's own split. To serve with "
            "it set VLLM_PP_LAYER_PARTITION to the same list.",
        ),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            help="KV memory of each rank, what vLLM logs as available KV cache memory. KB, MB, GB, "
            "TB are powers of 10; KiB, MiB, GiB, TiB powers of 2; a bare number is bytes.",
        ),
    ] = "24GiB",
    reserve: Annotated[
        str,
        typer.Option(
            help="Part of --memory that KVPP takes for its communicator and staging. On Ascend "
            "about 300MiB was measured.",
        ),
    ] = "0",
    main_cache: Annotated[
        str,
        typer.Option(
            help=f"Layout of the main cache: {AUTO} (the config's dtype), {', '.join(MAIN_LAYOUTS)}"
            ". fp8_ds_mla is CUDA's, sfa-c8 Ascend's packed sparse layout.",
        ),
    ] = AUTO,
    indexer_cache: Annotated[
        str,
        typer.Option(
            help=f"Layout of the indexer cache: {AUTO} (the config's dtype), {NO_INDEXER}, "
            f"{', '.join(INDEXER_LAYOUTS)}. CUDA uses fp8; c8-a2 and c8-a5 are LI-C8 on Ascend.",
        ),
    ] = AUTO,
    block_size: Annotated[
        str,
        typer.Option(metavar=_INT, help="Tokens per block. vLLM on CPU uses 16, vllm-ascend 128."),
    ] = "16",
    draft_layers: Annotated[
        str,
        typer.Option(
            metavar=_INT,
            help="MTP layers to serve with; each rank of the last stage keeps them whole. 0 plans "
            "without speculative decoding, whatever num_nextn_predict_layers the config has.",
        ),
    ] = "0",
    ownership: Annotated[
        str, typer.Option(help="Split of the layers over the ranks: count or bytes.")
    ] = OwnershipPolicy.COUNT.value,
    scratch: Annotated[
        str,
        typer.Option(
            help="Size of the scratch slots: largest (layer, both of them) or fitted (each to the "
            "layers that the rank receives into it)."
        ),
    ] = ScratchPolicy.LARGEST.value,
    alignment: Annotated[
        str, typer.Option(help="Every layer's cache starts at a multiple of this size.")
    ] = "1",
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw bytes per block of every rank into this PNG file.")
    ] = None,
) -> None:
    """How many tokens fit with KVPP off and on, per stage and rank. Needs no engine and no weights.

    Exit code 0 with a plan, also with one that saves nothing (then with a warning); 2 with a bad
    option, which one sentence on stderr names.
    """
    try:
        with naming_option("--model", model):
            shape = read_model_shape(model)
        stages = _whole("--pp", pp, 1)
        made = make_plan(
            PlanRequest(
                shape=shape,
                tp=_whole("--tp", tp, 1),
                pp=stages,
                pcp=_whole("--pcp", pcp, 1),
                layer_split=_layer_split(layer_split, shape, stages),
                memory=_size("--memory", memory),
                reserve=_size("--reserve", reserve),
                main_cache=_choice("--main-cache", main_cache, (AUTO, *MAIN_LAYOUTS)),
                indexer_cache=_choice(
                    "--indexer-cache", indexer_cache, (AUTO, NO_INDEXER, *INDEXER_LAYOUTS)
                ),
                block_size=_whole("--block-size", block_size, 1),
                draft_layers=_whole("--draft-layers", draft_layers, 0),
                ownership=OwnershipPolicy(_choice("--ownership", ownership, _POLICIES)),
                scratch=ScratchPolicy(_choice("--scratch", scratch, _SCRATCH)),
                alignment=_size("--alignment", alignment, least=1),
            )
        )
        if plot is not None:
            from kvpp_connectors.cli.plot import save_plot  # needs matplotlib, an extra

            save_plot(made, plot)
    except KvppError as error:
        typer.echo(f"kvpp plan: {error}", err=True)
        raise typer.Exit(_BAD_OPTION) from None
    if json_output:
        typer.echo(json.dumps(made.as_json()))
    else:
        _print_tables(made)
        if plot is not None:
            typer.echo(f"Picture: {plot}")
    for warning in made.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _whole(option: str, text: str, least: int) -> int:
    if not re.fullmatch(r"-?\d{1,9}", text, re.ASCII) or not least <= int(text) <= MOST:
        raise PlanError(f"{option} {text!r}: expected a whole number from {least} to {MOST}")
    return int(text)


def _choice(option: str, value: str, known: Sequence[str]) -> str:
    if value in known:
        return value
    close = difflib.get_close_matches(value.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise PlanError(f"{option} {value!r} is unknown: {hint}expected one of {', '.join(known)}")


def _size(option: str, text: str, least: int = 0) -> int:
    """Bytes of a size such as ``24GiB``, ``21.8GB`` or ``1000``."""
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise PlanError(
            f"{option} {text!r}: expected a size such as 24GiB (powers of 2: KiB, MiB, GiB, TiB), "
            "21.8GB (powers of 10: KB, MB, GB, TB) or a number of bytes"
        )
    size = int(Decimal(match[1]) * unit)
    if size < least:
        raise PlanError(f"{option} {text!r}: expected at least {least} byte")
    return size


def _layer_split(text: str | None, shape: ModelShape, stages: int) -> tuple[int, ...]:
    """Layers per PP stage: the option's, or vLLM's."""
    if text is None:
        if stages > shape.layers:
            raise PlanError(
                f"--pp {stages}: expected at most {shape.layers}, the layers of {shape.path}, so "
                "that no stage is empty"
            )
        return default_layer_split(shape.layers, stages)
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,5}", part, re.ASCII) for part in parts):
        raise PlanError(
            f"--layer-split {text!r}: expected positive whole numbers with commas between them, "
            "such as 38,40"
        )
    split = tuple(map(int, parts))
    if len(split) != stages:
        raise PlanError(
            f"--layer-split {text!r} has {len(split)} parts: expected {stages}, one for each stage "
            f"of --pp {stages}"
        )
    if sum(split) != shape.layers:
        raise PlanError(
            f"--layer-split {text!r} sums to {sum(split)}: expected {shape.layers}, the layers of "
            f"{shape.path}"
        )
    return split


def _print_tables(made: Plan) -> None:
    console = Console(width=max(Console().width, _MIN_WIDTH), highlight=False, markup=False)
    for line in _heading(made):
        console.print(line, soft_wrap=True)
    for stage in made.stages:
        console.print()
        console.print(_stage_table(stage))
    console.print()
    total = made.capacity
    console.print(
        f"Deployment: {total.tokens_off:,} tokens off, {total.tokens_on:,} on, "
        f"ratio {total.ratio:.4f}",
        style="bold green" if total.ratio > 1 else "bold red",
    )
    for line in (*made.capacity.explain().splitlines(), *_notes(made.request)):
        console.print(line, soft_wrap=True)


def _heading(made: Plan) -> Iterable[str]:
    request, shape = made.request, made.request.shape
    indexers = f", {len(shape.indexer_layers)} with an indexer" if shape.sparse else ""
    yield f"KVPP plan for {shape.path} ({shape.name}, {shape.layers} layers{indexers})"
    yield (
        f"TP {request.tp} x PCP {request.pcp}, PP {request.pp}; blocks of {request.block_size} "
        f"tokens; main cache {made.main_cache}, indexer cache {made.indexer_cache}; ownership by "
        f"{request.ownership}; {request.scratch} scratch"
    )
    yield f"{request.memory:,} bytes of KV memory per rank, {request.reserve:,} reserved by KVPP"


def _stage_table(stage: StagePlan) -> Table:
    figures = stage.capacity
    table = Table(
        title=f"Stage {figures.stage}: {span(figures.layers)}, "
        f"{figures.blocks_off:,} blocks off, {figures.blocks_on:,} on, ratio {figures.ratio:.4f}",
        title_justify="left",
    )
    for heading in ("rank", "owns"):
        table.add_column(heading)
    for heading in ("owned", "scratch", "drafts", "bytes/block", "of off"):
        table.add_column(heading, justify="right")
    table.add_column("")
    off = figures.bytes_per_block_off
    table.add_row(
        "any", "all (KVPP off)", *_sizes(off - stage.draft_bytes, 0, stage.draft_bytes, off)
    )
    table.add_section()
    for rank, owned in enumerate(stage.owned_bytes):
        binds = rank == figures.binding_rank
        table.add_row(
            str(rank),
            span(figures.owned_layers[rank]),
            *_sizes(owned, figures.scratch_bytes[rank], stage.draft_bytes, off),
            "binds" if binds else "",
            style="bold" if binds else None,
        )
    return table


def _sizes(owned: int, scratch: int, drafts: int, off: int) -> tuple[str, ...]:
    total = owned + scratch + drafts
    return (*(f"{size:,}" for size in (owned, scratch, drafts, total)), f"{total / off:.1%}")


def _notes(request: PlanRequest) -> Iterable[str]:
    shape = request.shape
    if shape.mtp_layers and not request.draft_layers:
        yield (
            f"The checkpoint has {shape.mtp_layers} MTP layer(s), not planned for: to serve with "
            f"MTP pass --draft-layers {shape.mtp_layers}."
        )
    if request.layer_split != default_layer_split(shape.layers, request.pp):
        split = ",".join(map(str, request.layer_split))
        yield f"vLLM splits the layers like this only with VLLM_PP_LAYER_PARTITION={split}."
