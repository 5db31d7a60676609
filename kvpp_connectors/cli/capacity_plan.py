"""The figures of `kvpp plan`: tokens that fit with KVPP off and on, per stage and rank.

Section 2.2 of the specification. The arithmetic is kvpp_core.capacity, which the engine uses, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from kvpp_connectors.cli.model_shapes import AUTO, NO_INDEXER, ModelShape
from kvpp_core.bundles import LayerBundle
from kvpp_core.capacity import DeploymentCapacity, StageCapacity, deployment, stage_capacity
from kvpp_core.errors import KvppError, PlanError
from kvpp_core.layout import ScratchPolicy
from kvpp_core.ownership import OwnershipPolicy

__all__ = ["MOST", "Plan", "PlanRequest", "StagePlan", "make_plan", "naming_option", "span"]

MOST = 16_384  # ranks, stages, tokens per block: a larger number is a slip


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options, parsed. Sizes in bytes."""

    shape: ModelShape
    tp: int
    pp: int
    pcp: int
    layer_split: tuple[int, ...]  # layers per PP stage
    memory: int
    reserve: int
    main_cache: str
    indexer_cache: str
    block_size: int  # tokens
    draft_layers: int
    ownership: OwnershipPolicy
    scratch: ScratchPolicy
    alignment: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Capacity of one PP stage, and the parts of its bytes per block."""

    capacity: StageCapacity
    draft_bytes: int  # bytes per block of the draft layers, the same on every rank

    @property
    def owned_bytes(self) -> tuple[int, ...]:
        """Bytes per block of the owned layers, by group rank."""
        sizes = zip(self.capacity.bytes_per_block_on, self.capacity.scratch_bytes, strict=True)
        return tuple(total - scratch - self.draft_bytes for total, scratch in sizes)

    def as_json(self) -> dict[str, Any]:
        """The stage's part of ``--json``. Sizes are bytes."""
        stage = self.capacity
        return {
            "stage": stage.stage,
            "layers": stage.layers,
            "owned_layers": stage.owned_layers,
            "bytes_per_block_off": stage.bytes_per_block_off,
            "bytes_per_block_on": stage.bytes_per_block_on,
            "blocks_off": stage.blocks_off,
            "blocks_on": stage.blocks_on,
            "ratio": round(stage.ratio, 4),
            "binding_rank": stage.binding_rank,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Capacity of the deployment and of its stages, for one request."""

    request: PlanRequest
    main_cache: str  # name of a layout; the request may say auto
    indexer_cache: str
    stages: tuple[StagePlan, ...]
    capacity: DeploymentCapacity

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons not to trust the figures, or not to use KVPP."""
        found = []
        shape, ratio = self.request.shape, self.capacity.ratio
        if ratio <= 1:
            found.append(
                f"KVPP on holds {ratio:.4f} times the tokens of KVPP off: leave enable_kvpp off"
                + (", or use fewer PP stages." if self.request.pp > 1 else ".")
            )
        if AUTO in (self.request.main_cache, self.request.indexer_cache):
            found += _dtype_warnings(shape)
        if not shape.sparse and self.request.indexer_cache not in (AUTO, NO_INDEXER):
            found.append(
                f"--indexer-cache {self.request.indexer_cache} has no effect: {shape.path} has no "
                "index_topk, so the model has no indexer."
            )
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints. Sizes are bytes."""
        request, capacity = self.request, self.capacity
        return {
            "model": str(request.shape.path),
            "tp": request.tp,
            "pcp": request.pcp,
            "pp": request.pp,
            "block_size": request.block_size,
            "memory_bytes": request.memory,
            "reserve_bytes": request.reserve,
            "alignment_bytes": request.alignment,
            "ownership": request.ownership.value,
            "scratch": request.scratch.value,
            "main_cache": self.main_cache,
            "indexer_cache": self.indexer_cache,
            "draft_layers": request.draft_layers,
            "ratio": round(capacity.ratio, 4),
            "tokens_off": capacity.tokens_off,
            "tokens_on": capacity.tokens_on,
            "blocks_off": capacity.blocks_off,
            "blocks_on": capacity.blocks_on,
            "binding_stage_off": capacity.binding_stage_off,
            "binding_stage_on": capacity.binding_stage_on,
            "stages": [stage.as_json() for stage in self.stages],
            "explanation": capacity.explain(),
        }


def make_plan(request: PlanRequest) -> Plan:
    """Plan the deployment.

    Raises:
        PlanError: an option does not fit the model, the group or the memory.
    """
    _check_group(request)
    with naming_option("--main-cache", request.main_cache):
        main = request.shape.main_layout(request.main_cache)
    with naming_option("--indexer-cache", request.indexer_cache):
        indexer = request.shape.indexer_layout(request.indexer_cache)
    targets = request.shape.target_bundles(main, indexer, request.block_size)
    drafts = request.shape.draft_bundles(request.draft_layers, main, indexer, request.block_size)
    bounds = pairwise((0, *accumulate(request.layer_split)))
    stages = tuple(
        _stage(request, stage, targets[start:end], drafts if stage == request.pp - 1 else ())
        for stage, (start, end) in enumerate(bounds)
    )
    total = deployment([stage.capacity for stage in stages], request.block_size)
    made = Plan(request, main, indexer, stages, total)
    _check_memory(made)
    return made


def _stage(
    request: PlanRequest, stage: int, bundles: Sequence[LayerBundle], drafts: Sequence[LayerBundle]
) -> StagePlan:
    return StagePlan(
        capacity=stage_capacity(
            stage,
            bundles,
            drafts,
            ranks=request.tp * request.pcp,
            memory=request.memory,
            reserve=request.reserve,
            policy=request.ownership,
            alignment=request.alignment,
            scratch=request.scratch,
        ),
        draft_bytes=sum(draft.bytes_per_block for draft in drafts),
    )


def _check_group(request: PlanRequest) -> None:
    ranks = request.tp * request.pcp
    if not 2 <= ranks <= MOST:
        raise PlanError(
            f"--tp {request.tp} --pcp {request.pcp} make a KVPP group of {ranks} rank(s): expected "
            f"2 to {MOST}, since KVPP spreads the layers over the ranks of that group"
        )
    if request.reserve >= request.memory:
        raise PlanError(
            f"--reserve {request.reserve:,} bytes: expected less than --memory, which is "
            f"{request.memory:,} bytes"
        )


def _check_memory(made: Plan) -> None:
    """One block must fit, with KVPP off and on, or the ratio compares nothing."""
    if made.capacity.blocks_off and made.capacity.blocks_on:
        return
    request = made.request
    off = max(stage.capacity.bytes_per_block_off for stage in made.stages)
    on = max(max(stage.capacity.bytes_per_block_on) for stage in made.stages)
    raise PlanError(
        f"--memory {request.memory:,} bytes is too small for one block of {request.block_size} "
        f"tokens: expected at least {off:,} bytes with KVPP off and {on + request.reserve:,} with "
        f"KVPP on (--reserve {request.reserve:,} included), plus padding if --alignment is set"
    )


def _dtype_warnings(shape: ModelShape) -> list[str]:
    if shape.dtype is None:
        return [f"{shape.path} names no dtype; {AUTO} took bf16, as vLLM does."]
    if shape.dtype.removeprefix("torch.") in ("float32", "float"):
        options = "--main-cache bf16" + (" --indexer-cache bf16" if shape.sparse else "")
        return [
            f"{shape.path} says {shape.dtype}, so {AUTO} took fp32; vLLM's --dtype auto serves "
            f"such a model in bf16: pass {options} unless you serve with --dtype float32."
        ]
    return []


@contextmanager
def naming_option(option: str, value: object) -> Iterator[None]:
    """Name the option in errors about its value."""
    try:
        yield
    except KvppError as error:
        raise PlanError(f"{option} {value}: {error}") from None


def span(layers: Sequence[int]) -> str:
    """Contiguous layers as text: ``layers 0-9``, ``layer 4`` or ``no layers``."""
    if len(layers) > 1:
        return f"layers {layers[0]}-{layers[-1]}"
    return f"layer {layers[0]}" if layers else "no layers"
