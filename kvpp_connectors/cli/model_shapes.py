"""The KV cache of an MLA/SFA model, from its Hugging Face config.json.

For `kvpp plan`, which imports neither torch nor vLLM. An engine takes the bundles from its own KV
cache specs instead (section 2.2 of the specification).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from kvpp_core.bundles import Component, LayerBundle
from kvpp_core.errors import KvppError, PlanError

__all__ = [
    "AUTO",
    "INDEXER_LAYOUTS",
    "MAIN_LAYOUTS",
    "NO_INDEXER",
    "CacheLayout",
    "ModelConfigError",
    "ModelShape",
    "default_layer_split",
    "read_model_shape",
]

AUTO = "auto"  # the layout of the config's dtype
NO_INDEXER = "none"
_TILE = 128  # elements that share one scale
_CONFIG_NAME = "config.json"


class ModelConfigError(KvppError):
    """config.json cannot be read, or does not describe a model that KVPP can serve."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Bytes of one token in one cache."""

    element: int  # per element of the latent, or of the indexer key
    rope: int = 0  # per element of the rotary part (main cache only)
    scale: int = 0  # per tile of 128 elements
    scale_apart: bool = False  # the scales are a component of their own, not packed
    sparse_only: bool = False  # for sparse attention (SFA/DSA) only

    def data_bytes(self, elements: int, rope: int = 0) -> int:
        """Bytes per token of the data component: latent or key, rotary part, packed scales."""
        packed = 0 if self.scale_apart else self.scale_bytes(elements)
        return elements * self.element + rope * self.rope + packed

    def scale_bytes(self, elements: int) -> int:
        """Bytes per token of the scales."""
        return self.scale * (elements // _TILE)


# As in vLLM 0.32 (MLA backends, DeepseekV32IndexerCache) and vllm-ascend's specs.
MAIN_LAYOUTS: Mapping[str, CacheLayout] = MappingProxyType(
    {
        "bf16": CacheLayout(element=2, rope=2),
        "fp16": CacheLayout(element=2, rope=2),
        "fp32": CacheLayout(element=4, rope=4),
        "fp8": CacheLayout(element=1, rope=1),
        # 512 fp8 + 64 bf16 + 4 fp32 scales = 656 bytes per token
        "fp8_ds_mla": CacheLayout(element=1, rope=2, scale=4, sparse_only=True),  # CUDA
        "sfa-c8": CacheLayout(element=1, rope=2, scale=4, sparse_only=True),  # Ascend
    }
)
INDEXER_LAYOUTS: Mapping[str, CacheLayout] = MappingProxyType(
    {
        "bf16": CacheLayout(element=2),
        "fp16": CacheLayout(element=2),
        "fp32": CacheLayout(element=4),
        "fp8": CacheLayout(element=1, scale=4),  # CUDA: 128 fp8 + 1 fp32, packed
        "c8-a2": CacheLayout(element=1, scale=2, scale_apart=True),  # Atlas A2/A3: int8 + fp16
        "c8-a5": CacheLayout(element=1, scale=4, scale_apart=True),  # Atlas A5: fp8 + fp32
    }
)
_DTYPE_LAYOUTS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}
# layer_types that keep every token of one cache, as vLLM 0.32 spells them
_FULL_ATTENTION = (
    "attention",
    "full_attention",
    "indexed_attention",
    "deepseek_sparse_attention",
)


class _HfConfig(BaseModel):
    """The fields of config.json that shape the KV cache. A null field counts as absent."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    # Fields of hybrid models: attention mixed with other layers, or several caches per layer.
    HYBRID_FIELDS: ClassVar[tuple[str, ...]] = (
        "linear_attn_config",
        "layer_group_size",
        "compress_ratios",
    )

    num_hidden_layers: Annotated[int, Field(ge=1, le=10_000)]
    kv_lora_rank: PositiveInt
    qk_rope_head_dim: PositiveInt
    index_topk: PositiveInt | None = None
    index_head_dim: PositiveInt | None = None
    index_topk_freq: PositiveInt = 1
    index_topk_pattern: Annotated[str, Field(pattern="^[FS]+$")] | None = None
    index_skip_topk_offset: NonNegativeInt = 2
    num_nextn_predict_layers: NonNegativeInt = 0
    model_type: str = ""
    architectures: list[str] = []
    torch_dtype: str | None = None
    dtype: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None}

    def has_indexer(self, layer: int) -> bool:
        """vLLM's rule for target layers: one that shares another layer's top-k has no indexer."""
        if self.index_topk_pattern is None:
            return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0
        return self.index_topk_pattern[layer : layer + 1] != "S"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Layers of a model, and what each of them keeps per token."""

    path: Path  # the config.json
    name: str  # model_type, or the architecture
    layers: int  # target layers
    kv_lora_rank: int  # elements per token and layer
    qk_rope_head_dim: int  # elements per token and layer
    index_head_dim: int  # elements per token and layer with an indexer; 0: not a sparse model
    indexer_layers: frozenset[int]  # target layers that have an indexer cache
    mtp_layers: int  # num_nextn_predict_layers of the checkpoint
    dtype: str | None  # as in config.json

    @property
    def sparse(self) -> bool:
        """Whether the model uses sparse attention: layers may have an indexer."""
        return self.index_head_dim > 0

    def main_layout(self, name: str) -> str:
        """The name in MAIN_LAYOUTS that ``name`` (or ``auto``) stands for.

        Raises:
            PlanError: the layout is unknown, or does not exist for this model.
        """
        chosen = self._of_dtype() if name == AUTO else name
        layout = MAIN_LAYOUTS.get(chosen)
        if layout is None:
            raise PlanError(f"main cache layout {name!r} is unknown; known: {_names(MAIN_LAYOUTS)}")
        if layout.sparse_only and not self.sparse:
            usable = [key for key, value in MAIN_LAYOUTS.items() if not value.sparse_only]
            raise PlanError(
                f"main cache layout {name!r} exists for sparse attention only, and {self.path} has "
                f"no index_topk; expected one of {', '.join((AUTO, *usable))}"
            )
        self._check_tiles(name, layout, "kv_lora_rank", self.kv_lora_rank)
        return chosen

    def indexer_layout(self, name: str) -> str:
        """The name in INDEXER_LAYOUTS that ``name`` (or ``auto``) stands for, or ``none``.

        ``none`` for every name where the model has no indexer.

        Raises:
            PlanError: the layout is unknown, or does not exist for this model.
        """
        if name not in (AUTO, NO_INDEXER, *INDEXER_LAYOUTS):
            raise PlanError(
                f"indexer cache layout {name!r} is unknown; known: {_names(INDEXER_LAYOUTS)}"
            )
        if not self.sparse or name == NO_INDEXER:
            return NO_INDEXER
        chosen = self._of_dtype() if name == AUTO else name
        self._check_tiles(name, INDEXER_LAYOUTS[chosen], "index_head_dim", self.index_head_dim)
        return chosen

    def target_bundles(self, main: str, indexer: str, block_size: int) -> tuple[LayerBundle, ...]:
        """The bundles of all target layers, for blocks of ``block_size`` tokens.

        Raises:
            PlanError: a layout is unknown, or does not exist for this model.
        """
        return self._bundles(range(self.layers), self.indexer_layers, main, indexer, block_size)

    def draft_bundles(
        self, count: int, main: str, indexer: str, block_size: int
    ) -> tuple[LayerBundle, ...]:
        """The bundles of ``count`` MTP layers: each has main cache and, when sparse, an indexer.

        Raises:
            PlanError: a layout is unknown, or does not exist for this model.
        """
        layers = range(self.layers, self.layers + count)
        return self._bundles(layers, frozenset(layers), main, indexer, block_size)

    def _bundles(
        self, layers: range, with_indexer: frozenset[int], main: str, indexer: str, block_size: int
    ) -> tuple[LayerBundle, ...]:
        latent = MAIN_LAYOUTS[self.main_layout(main)]
        index = INDEXER_LAYOUTS.get(self.indexer_layout(indexer))
        per_token = {"main": latent.data_bytes(self.kv_lora_rank, self.qk_rope_head_dim)}
        if index is not None:
            per_token["indexer"] = index.data_bytes(self.index_head_dim)
            if index.scale_apart:
                per_token["indexer_scale"] = index.scale_bytes(self.index_head_dim)
        return tuple(
            LayerBundle(
                layer,
                tuple(
                    Component(f"model.layers.{layer}.{part}", size * block_size)
                    for part, size in per_token.items()
                    if part == "main" or layer in with_indexer
                ),
            )
            for layer in layers
        )

    def _of_dtype(self) -> str:
        """The layout of the model's own dtype; vLLM takes bf16 where config.json names none."""
        dtype = (self.dtype or "bfloat16").removeprefix("torch.")
        if dtype not in _DTYPE_LAYOUTS:
            raise PlanError(
                f"cache layout 'auto' follows the dtype of {self.path}, which is {self.dtype!r}; "
                f"expected bfloat16, float16 or float32: name the cache layout"
            )
        return _DTYPE_LAYOUTS[dtype]

    def _check_tiles(self, name: str, layout: CacheLayout, field: str, elements: int) -> None:
        if layout.scale and elements % _TILE:
            raise PlanError(
                f"cache layout {name!r} keeps one scale per {_TILE} elements, and {field} = "
                f"{elements} of {self.path} is not a multiple of {_TILE}; choose an unscaled layout"
            )


def read_model_shape(path: Path) -> ModelShape:
    """Read a model's shape from ``path``, a config.json or the folder that holds one.

    Fields of a nested ``text_config`` (multimodal models such as Kimi-K2.5) override the top level.

    Raises:
        ModelConfigError: no such file, not JSON, a field is missing or wrong, or the model is not
            a non-hybrid MLA/SFA model.
    """
    file = _config_file(path)
    fields = _flatten(_read_json(file))
    _check_supported(file, fields)
    try:
        config = _HfConfig.model_validate(fields)
    except ValidationError as error:
        raise ModelConfigError(_first_error(file, error)) from None
    if config.index_topk is not None and config.index_head_dim is None:
        raise ModelConfigError(
            f"{file} has index_topk but no index_head_dim; expected both for a sparse model"
        )
    sparse = config.index_topk is not None
    layers = range(config.num_hidden_layers)
    return ModelShape(
        path=file,
        name=config.model_type or next(iter(config.architectures), "unnamed model"),
        layers=config.num_hidden_layers,
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        index_head_dim=(config.index_head_dim or 0) if sparse else 0,
        indexer_layers=frozenset(i for i in layers if sparse and config.has_indexer(i)),
        mtp_layers=config.num_nextn_predict_layers,
        dtype=config.dtype or config.torch_dtype,
    )


def default_layer_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per PP stage as vLLM 0.32 splits them (vllm.distributed.utils.get_pp_indices).

    The remainder goes to the stages just before the last one, a layer each.
    """
    share, remainder = divmod(layers, stages)
    return tuple(share + (1 <= stages - 1 - stage <= remainder) for stage in range(stages))


def _config_file(path: Path) -> Path:
    try:
        return path / _CONFIG_NAME if path.is_dir() else path
    except OSError:  # no access to a parent folder: reading reports it
        return path


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(
            f"{file} does not exist; expected a config.json or a local folder that holds one "
            f"(for a Hub model: hf download ORG/NAME {_CONFIG_NAME} --local-dir FOLDER)"
        ) from None
    except OSError as error:
        raise ModelConfigError(
            f"{file} cannot be read ({error.strerror}); expected a readable config.json"
        ) from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested too deeply
        raise ModelConfigError(
            f"{file} is not valid JSON ({error}); expected the config.json of a model"
        ) from None
    if not isinstance(data, dict):
        raise ModelConfigError(
            f"{file} holds a JSON {type(data).__name__}; expected an object with the model's fields"
        )
    return data


def _flatten(data: dict[str, Any]) -> dict[str, Any]:
    """The top level, overridden by the non-null fields of ``text_config``."""
    text = data.get("text_config")
    if not isinstance(text, dict):
        return data
    return data | {key: value for key, value in text.items() if value is not None}


def _check_supported(file: Path, fields: Mapping[str, Any]) -> None:
    name = fields.get("model_type") or fields.get("architectures") or "no model_type"
    if fields.get("kv_lora_rank") is None:
        raise ModelConfigError(
            f"{file} ({name}) has no kv_lora_rank; KVPP needs a non-hybrid MLA/SFA model such as "
            "DeepSeek-V2/V3/V3.2, GLM-5 or Kimi-K2, whose config.json has that field"
        )
    mixed = next((key for key in _HfConfig.HYBRID_FIELDS if fields.get(key) is not None), None)
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list):
        other = [kind for kind in layer_types if kind not in _FULL_ATTENTION]
        mixed = mixed or (f"layer_types with {other[0]!r}" if other else None)
    if mixed:
        raise ModelConfigError(
            f"{file} ({name}) has {mixed}, so it is a hybrid model; KVPP needs a non-hybrid "
            "MLA/SFA model: serve this one without KVPP"
        )


def _first_error(file: Path, error: ValidationError) -> str:
    """A sentence about the first wrong field."""
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{file} has no {field}; KVPP needs an MLA/SFA model, whose config.json has it"
    return f"{file} has {field} = {first['input']!r}; {first['msg']}"


def _names(layouts: Mapping[str, CacheLayout]) -> str:
    return ", ".join((AUTO, *layouts))
