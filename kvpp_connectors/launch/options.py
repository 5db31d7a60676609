"""``--additional-config`` as typed settings.

    {"enable_kvpp": true, "kvpp": {"broadcast": "auto", "ownership": "count", ...}}

``enable_kvpp`` is the specification's switch (default false); the object ``kvpp`` is ours and
optional. The rest of additional_config belongs to others and is left alone, except for keys that
look like a misspelt one of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvpp_connectors.connector.names import OPTIONS, SWITCH
from kvpp_connectors.connector.options import OptionsError, nearest, read_model
from kvpp_connectors.launch.mention import resembles_our_key
from kvpp_connectors.launch.problems import Problem
from kvpp_core.layout import ScratchPolicy
from kvpp_core.ownership import OwnershipPolicy
from kvpp_core.policy import BroadcastPolicy, CostModel, DecodePolicy

__all__ = ["KvppOptions", "Settings", "read_settings"]

_LONGEST_WAIT_S = 86_400  # a day
_RETIRED = {"kvpp_size": "the group is always TP x PCP"}


class BroadcastCost(BaseModel):
    """What a broadcast costs, in place of what is measured at start-up."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    latency_s: float = Field(gt=0, le=1, description="seconds of one message")
    per_range_s: float = Field(gt=0, le=1, description="seconds of each further message")
    bytes_per_s: float = Field(gt=0, description="of the broadcast")
    packed_bytes_per_s: float = Field(
        gt=0, description="of gathering on the owner, then scattering on the others"
    )

    def model(self) -> CostModel:
        """For the core."""
        return CostModel(
            self.latency_s, self.per_range_s, self.bytes_per_s, self.packed_bytes_per_s
        )


class KvppOptions(BaseModel):
    """The keys of ``additional_config.kvpp``, all optional."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    broadcast: BroadcastPolicy = Field(
        default=BroadcastPolicy.AUTO,
        strict=False,
        description="auto: the cheapest of full, runs and packed for each layer and step; full: "
        "the specification's complete bundles; active: never full; runs, packed: always that "
        "(to measure)",
    )
    broadcast_cost: BroadcastCost | None = Field(
        default=None,
        description="what a broadcast costs, by which `auto` chooses: an object of latency_s, "
        "per_range_s, bytes_per_s, packed_bytes_per_s; measured at start-up if left out",
    )
    decode: DecodePolicy = Field(
        default=DecodePolicy.BROADCAST,
        strict=False,
        description="broadcast: the history of decode tokens moves like any other; owner: their "
        "queries go to the owner of each layer instead, and results come back; auto: owner where "
        "the model and the platform can, else broadcast",
    )
    ownership: OwnershipPolicy = Field(
        default=OwnershipPolicy.COUNT,
        strict=False,
        description="count: layer counts differ by one at most; bytes: the largest rank keeps as "
        "few bytes as possible",
    )
    scratch: ScratchPolicy = Field(
        default=ScratchPolicy.LARGEST,
        strict=False,
        description="largest: both scratch slots hold the largest layer; fitted: each holds the "
        "largest layer that the rank receives into it",
    )
    staging_bytes: int = Field(
        default=32 << 20,
        ge=0,
        description="memory for packed broadcasts, taken before vLLM measures what is left for the "
        "KV cache; 0 turns packing off",
    )
    reserve_bytes: int = Field(
        default=0,
        ge=0,
        description="KV memory to leave unused, for what a communicator allocates later",
    )
    alignment_bytes: int = Field(
        default=1, ge=1, description="every layer's cache starts at a multiple of this"
    )
    transfer_timeout_s: float = Field(
        default=120.0,
        gt=0,
        le=_LONGEST_WAIT_S,
        description="bound of each wait for a broadcast",
    )
    load_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=_LONGEST_WAIT_S,
        description="bound of a connector's load of one layer, once the layer is due",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="each worker serves its broadcasts' counters for Prometheus at this port + its "
        "rank",
    )
    poison_scratch: bool = Field(
        default=False,
        description="fill scratch memory with 0xFF at the start of each step, so that "
        "a missing broadcast shows; costs memory bandwidth, for tests",
    )
    cpu_profile: bool = Field(
        default=False,
        description="apply the CPU profile (docs/cpu.md) to an engine without KVPP as well",
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """What additional_config says: the switch and the options."""

    enabled: bool = False
    options: KvppOptions = field(default_factory=KvppOptions)


def read_settings(written: object) -> tuple[Settings, list[Problem]]:
    """Read our keys of additional_config; what cannot be read becomes a problem and counts as its
    default. vLLM takes any object with a hash there: what is no dict has none of our keys.
    """
    additional_config = written if isinstance(written, dict) else {}
    problems = list(_check_keys(additional_config))
    enabled = additional_config.get(SWITCH, False)
    if not isinstance(enabled, bool):
        problems.append(
            Problem(
                rule="switch-is-boolean",
                option=f"additional_config.{SWITCH}",
                value=repr(enabled),
                reason="It switches KVPP on or off and must be a JSON boolean.",
                remedy=f'Write {{"{SWITCH}": true}} or leave it out.',
            )
        )
        enabled = False
    try:
        prefix = f"additional_config.{OPTIONS}."
        options = read_model(KvppOptions, additional_config.get(OPTIONS, {}), prefix)
    except OptionsError as error:
        problems += [Problem.of(complaint, "option-values") for complaint in error.complaints]
        options = KvppOptions()
    return Settings(enabled, options), problems


def _check_keys(additional_config: Mapping[Any, Any]) -> Iterator[Problem]:
    ours = SWITCH in additional_config or OPTIONS in additional_config
    for key, value in additional_config.items():
        name = str(key)
        option = f"additional_config.{name}"
        if name in (SWITCH, OPTIONS):
            continue
        if name in _RETIRED:
            reason = f"This key is no longer supported: {_RETIRED[name]}."
            yield Problem("known-keys", option, repr(value), reason, "Remove it.")
        elif resembles_our_key(name):
            reason = "This key looks like one of KVPP's but is none."
            remedy = nearest(name, (SWITCH, OPTIONS))
            yield Problem("known-keys", option, repr(value), reason, remedy)
        elif ours and name in KvppOptions.model_fields:
            reason = "Here nobody reads it: it is an option of KVPP."
            remedy = f"It belongs into additional_config.{OPTIONS}.{name}."
            yield Problem("options-in-kvpp", option, repr(value), reason, remedy)
