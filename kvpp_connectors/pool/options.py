"""The settings of AscendStoreConnector, from kv_transfer_config to typed values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from kvpp_connectors.connector.options import contradiction, read_extra_config

__all__ = ["IDLE_KEYS", "PoolOptions", "loads_blocks", "read_pool_options"]

# Keys of vllm-ascend's connector that decide nothing here: taken, and logged once.
IDLE_KEYS = {
    "lookup_rpc_port": "the scheduler asks the store itself",
    "mooncake_rpc_port": "the scheduler asks the store itself",
    "layerwise_max_transfer_blocks": "staging bounds each transfer",
    "layerwise_max_transfer_bytes": "staging bounds each transfer",
    "prefill_tp_size": "peers are learnt, not configured",
    "decode_tp_size": "peers are learnt, not configured",
    "prefill_pp_size": "peers are learnt, not configured",
    "prefill_pp_layer_partition": "peers are learnt, not configured",
    "qos_priority": "the store has no priorities",
}


class PoolOptions(BaseModel):
    """``kv_connector_extra_config`` of AscendStoreConnector. Everything has a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Annotated[
        Literal["mooncake", "memcache"],
        BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
    ] = Field(default="mooncake", description="mooncake or memcache")
    use_layerwise: bool = Field(
        default=False, description="true: load and save layer by layer (mooncake only)"
    )
    load_async: bool = Field(
        default=False, description="true: load between steps; false: before the step that needs it"
    )
    discard_partial_chunks: Literal[True] = Field(
        default=True, description="true: only whole blocks are pooled"
    )
    layerwise_prefetch_layers: int = Field(
        default=1, ge=0, le=1024, description="how many layers ahead a layer's load is submitted"
    )
    consumer_is_to_load: bool = Field(default=False, description="whether a kv_consumer loads")
    consumer_is_to_put: bool = Field(default=False, description="whether a kv_consumer saves")
    save_decode_cache: bool = Field(
        default=False, description="true: save blocks that decoding fills, too"
    )
    mooncake: dict[str, Any] | None = Field(
        default=None, description="how to reach Mooncake; else MOONCAKE_CONFIG_PATH names a file"
    )
    model_id: str | None = Field(
        default=None,
        max_length=256,
        description="name of the weights, where nodes keep them under different paths",
    )
    lookup_deadline_s: float = Field(
        default=0.5, gt=0, le=60, description="bound of one request's lookup"
    )
    lookup_wait_s: float = Field(
        default=0.005, ge=0, le=1, description="how long one step waits for its lookups at most"
    )
    staging_bytes: int = Field(
        default=64 << 20,
        ge=1 << 20,
        description="memory for packing objects, once for saving and once for loading",
    )
    hold_timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=600,
        description="how long a preemption waits for a save that still reads the blocks",
    )

    @field_validator("use_layerwise")
    @classmethod
    def _check_backend(cls, layerwise: bool, info: ValidationInfo) -> bool:
        if layerwise and info.data.get("backend", "mooncake") != "mooncake":
            raise contradiction(
                "memcache-whole-blocks",
                "MemCache pools load and save whole blocks.",
                'Set use_layerwise to false, or use backend "mooncake".',
            )
        return layerwise

    @field_validator("load_async")
    @classmethod
    def _check_layerwise(cls, between_steps: bool, info: ValidationInfo) -> bool:
        if between_steps and info.data.get("use_layerwise"):
            raise contradiction(
                "layerwise-loads-in-step",
                "Layerwise pooling submits loads layer by layer inside the step.",
                "Set load_async to false.",
            )
        return between_steps


def loads_blocks(role: object, consumer_is_to_load: object) -> bool:
    """Whether a pool's connector of this ``kv_role`` takes blocks out of the pool."""
    return role != "kv_consumer" or bool(consumer_is_to_load)


def read_pool_options(
    extra: Mapping[str, Any], path: str = "kv_connector_extra_config"
) -> PoolOptions:
    """The options, checked.

    Raises:
        OptionsError: names each key that is unknown or has a wrong value, and what is expected.
    """
    return read_extra_config(PoolOptions, extra, path, IDLE_KEYS)
