"""How to reach a Mooncake store: inline settings, or the file that MOONCAKE_CONFIG_PATH names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvpp_connectors.connector.host import is_every_interface
from kvpp_connectors.connector.options import Complaint, OptionsError, read_model

__all__ = [
    "CONFIG_VARIABLE",
    "LEAST_SEGMENT",
    "MooncakeSettings",
    "read_bytes",
    "read_mooncake_settings",
]

CONFIG_VARIABLE = "MOONCAKE_CONFIG_PATH"
LEAST_SEGMENT = 16 << 20  # bytes; Mooncake refuses a smaller one
# Mooncake's users set these in the environment; there they win over the file.
_VARIABLES = {
    "MOONCAKE_MASTER": "master_server_address",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE": "global_segment_size",
}
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"\s*(\d+)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)
_LAST_PORT = 65535


def read_bytes(text: str) -> int | None:
    """``"512MB"`` as bytes; Mooncake's units are powers of two. None where that is no size."""
    match = _SIZE.fullmatch(text)
    return int(match[1]) << _UNITS[match[2].lower()] if match else None


def _bytes(value: object) -> object:
    size = read_bytes(value) if isinstance(value, str) else None
    return value if size is None else size


def _address(value: str) -> str:
    """Of one master: host:port. Of several: a URL of the service that knows them."""
    if "://" in value:
        return value
    host, _, port = value.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= _LAST_PORT):
        raise ValueError(f"the port is missing or none: it is a number from 1 to {_LAST_PORT}")
    return value


Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=0)]


class MooncakeSettings(BaseModel):
    """``kv_connector_extra_config.mooncake``, or a mooncake.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    master_server_address: Annotated[str, AfterValidator(_address)] = Field(
        description="host:port of mooncake_master, or etcd://... of several"
    )
    metadata_server: str = Field(
        default="P2PHANDSHAKE", description="P2PHANDSHAKE (no server needed) or a server's URL"
    )
    protocol: Literal["tcp", "rdma", "ascend"] | None = Field(
        default=None, description="tcp, rdma or ascend; by platform if left out"
    )
    device_name: str = Field(default="", description="RDMA devices; empty for all")
    local_hostname: str | None = Field(
        default=None, description="one address of this host, by which others reach it"
    )
    global_segment_size: Bytes = Field(
        default=1 << 30,
        description="memory of each worker for the pool: 0, or 16 MiB and more; 4GB is 4 << 30",
    )
    local_buffer_size: Bytes = Field(
        default=0, description="memory that Mooncake takes for itself; not needed here"
    )
    preferred_segment: bool = Field(
        default=False, description="keep what a worker saves in its own segment while there is room"
    )
    prefer_alloc_in_same_node: bool = Field(
        default=True, description="keep it on its own node; where objects are not packed"
    )
    replica_num: int = Field(default=1, ge=1, le=8, description="copies of each object")
    enable_ssd_offload: bool = Field(default=False, description="let Mooncake use a disk, too")
    ssd_offload_path: str = Field(default="", description="absolute path of a folder for that")
    tenant_id: str = Field(default="default", description="only with --enable_multi_tenants")
    verify_puts: bool = Field(
        default=True,
        description="ask after each put whether the object is there; grants it a lease",
    )
    no_space_waits_ms: tuple[int, ...] = Field(
        default=(5, 10, 20, 40),
        description="pauses before a put that found no space is tried again",
    )

    @model_validator(mode="after")
    def _check(self) -> MooncakeSettings:
        if 0 < self.global_segment_size < LEAST_SEGMENT:
            raise ValueError(
                f"global_segment_size = {self.global_segment_size}: Mooncake refuses segments "
                f"under {LEAST_SEGMENT} bytes (16 MiB); give 0 or more than that"
            )
        if self.local_hostname and is_every_interface(self.local_hostname):
            raise ValueError(
                f"local_hostname = {self.local_hostname!r} means every interface; "
                "give one address of this host"
            )
        return self


def read_mooncake_settings(
    extra: Mapping[str, Any],
    environment: Mapping[str, str],
    path: str = "kv_connector_extra_config",
) -> MooncakeSettings:
    """The settings, checked.

    Args:
        extra: ``kv_connector_extra_config``; its key ``mooncake`` wins over the file.
        environment: for MOONCAKE_CONFIG_PATH, MOONCAKE_MASTER, MOONCAKE_GLOBAL_SEGMENT_SIZE.
        path: where ``extra`` stands, for errors.

    Raises:
        OptionsError: there are none, the file cannot be read, or a key is unknown or wrong; names
            each, and what is expected.
    """
    inline = extra.get("mooncake")
    if inline is not None:
        prefix, values = f"{path}.mooncake.", inline
    elif CONFIG_VARIABLE in environment:
        file = environment[CONFIG_VARIABLE]
        prefix, values = f"{file}: ", _read_file(file)
    else:
        missing = Complaint(
            f"{path}.mooncake",
            "nothing",
            "backend=mooncake does not know its master.",
            'Write {"master_server_address": "host:port"} there, or name a mooncake.json in '
            f"{CONFIG_VARIABLE}.",
        )
        raise OptionsError([missing])
    if isinstance(values, Mapping):
        values = {
            **values,
            **{k: environment[v] for v, k in _VARIABLES.items() if v in environment},
        }
    return read_model(MooncakeSettings, values, prefix)


def _read_file(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = f"The file cannot be read: {error}."
        complaint = Complaint(CONFIG_VARIABLE, path, reason, "Name a file with a JSON object.")
        raise OptionsError([complaint]) from error
