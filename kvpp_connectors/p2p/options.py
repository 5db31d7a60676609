"""The options of MooncakeConnectorV2, from kv_transfer_config to typed values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvpp_connectors.connector.host import is_every_interface, own_host
from kvpp_connectors.connector.options import Complaint, OptionsError, read_extra_config

__all__ = ["IDLE_KEYS", "KEY_VARIABLE", "P2pOptions", "listening_host", "read_key", "read_options"]

KEY_VARIABLE = "KVPP_P2P_KEY"
LEAST_KEY = 16  # bytes
# Keys of the first MooncakeConnector on Ascend.
IDLE_KEYS = {
    "prefill": "sizes are learnt from the peer",
    "decode": "sizes are learnt from the peer",
    "use_ascend_direct": "protocol says which transport is used",
}


class P2pOptions(BaseModel):
    """``kv_connector_extra_config`` of MooncakeConnectorV2. Everything has a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    protocol: Literal["tcp", "rdma", "ascend"] | None = Field(
        default=None, description="Mooncake's transport; by platform if left out"
    )
    host: str | None = Field(
        default=None, description="address to listen on and publish; vLLM's own (VLLM_HOST_IP) else"
    )
    lease_seconds: float = Field(
        default=120.0,
        gt=0,
        le=86400,
        description="how long prefill keeps a finished request's blocks for decode",
    )
    control_timeout_s: float = Field(
        default=5.0, gt=0, le=300, description="bound of each wait for a control message's answer"
    )
    pull_timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="bound of one request's reads"
    )
    window: int = Field(default=16, ge=1, le=1024, description="reads in flight for one request")
    threads: int = Field(default=4, ge=1, le=64, description="requests pulled at the same time")
    share_pulls: bool = Field(
        default=False,
        description="whether the ranks of a decode group each pull a share of the layers from "
        "prefill and take the others' shares from them",
    )
    share_wait_s: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="how much longer than its own share a rank waits for another rank's",
    )
    model_id: str | None = Field(
        default=None,
        max_length=256,
        description="name of the weights, where both sides keep them under different paths",
    )
    key_file: str | None = Field(
        default=None,
        description=f"file with a key shared by all nodes; or the variable {KEY_VARIABLE}",
    )

    @field_validator("host")
    @classmethod
    def _one_interface(cls, host: str | None) -> str | None:
        if host is not None and is_every_interface(host):
            raise ValueError("all interfaces, which no peer can connect to: give one address")
        return host if host is None else host.strip("[] ")


def read_options(extra: Mapping[str, Any], path: str = "kv_connector_extra_config") -> P2pOptions:
    """The options, checked.

    Raises:
        OptionsError: names each key that is unknown or has a wrong value, and what is expected.
    """
    return read_extra_config(P2pOptions, extra, path, IDLE_KEYS)


def read_key(options: P2pOptions, path: str = "kv_connector_extra_config") -> bytes | None:
    """The shared key, or None.

    Raises:
        OptionsError: the file cannot be read, or the key is too short to be one.
    """
    if options.key_file is not None:
        option, source = f"{path}.key_file", options.key_file
        try:
            key = Path(options.key_file).read_bytes().strip()
        except (OSError, ValueError) as error:
            reason = f"The file cannot be read: {error}."
            remedy = "Name a file that this process may read, on every node."
            raise OptionsError([Complaint(option, source, reason, remedy)]) from error
    elif KEY_VARIABLE in os.environ:
        option, source = KEY_VARIABLE, "set"
        key = os.environ[KEY_VARIABLE].encode()
    else:
        return None
    if len(key) < LEAST_KEY:
        reason = f"The key has {len(key)} bytes, which is too short to be one."
        remedy = f"Give it {LEAST_KEY} bytes or more."
        raise OptionsError([Complaint(option, source, reason, remedy)])
    return key


def listening_host(options: P2pOptions) -> str:
    """The address to bind and to publish: never all interfaces."""
    return options.host or own_host()
