"""The KV connectors of a launch: the one of kv_transfer_config, or a MultiConnector's children.

How a child has to be written holds with KVPP and without; what KVPP asks of it besides stands in
rules.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvpp_connectors.connector.names import MULTI, OURS, P2P, POOL
from kvpp_connectors.connector.options import nearest
from kvpp_connectors.launch.mention import child_configs, nearest_connector
from kvpp_connectors.launch.problems import Problem
from kvpp_connectors.pool.options import loads_blocks

__all__ = ["Connector", "read_children", "read_connector"]

_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_VLLMS_KV_PORT = 14579  # KVTransferConfig's default
_EXTRA = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class Connector:
    """One KV connector of the launch. ``path`` names where it stands: the option or the child."""

    path: str
    name: str  # empty where nothing names one
    role: object
    extra: Mapping[str, Any] = field(default_factory=dict)
    port: object = _VLLMS_KV_PORT
    foreign: bool = False  # vLLM or another plug-in knows its name, or a module is named
    unreadable: tuple[Problem, ...] = ()  # how a child is written
    children: tuple[Connector, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether this package serves it."""
        return self.name in OURS

    @property
    def meant(self) -> str | None:
        """The name of ours that a misspelt one stands for."""
        known = self.is_ours or self.foreign or self.name == MULTI
        return None if known else nearest_connector(self.name)

    @property
    def loads(self) -> bool:
        """Whether it takes blocks from elsewhere into this engine."""
        if self.name == POOL:
            return loads_blocks(self.role, self.extra.get("consumer_is_to_load"))
        return self.name == P2P and self.role != "kv_producer"


def read_connector(transfer: Any) -> Connector | None:
    """The connector of a KVTransferConfig, with its children; None where it names none."""
    if transfer is None or not transfer.kv_connector:
        return None
    path, name = "kv_transfer_config", transfer.kv_connector
    extra, keys = transfer.kv_connector_extra_config, [key.name for key in fields(transfer)]
    return Connector(
        path=path,
        name=name,
        role=transfer.kv_role,
        extra=extra,
        port=transfer.kv_port,
        foreign=_is_foreign(name, transfer.kv_connector_module_path),
        children=read_children(child_configs(name, extra), keys),
    )


def read_children(entries: Sequence[object], keys: Sequence[str]) -> tuple[Connector, ...]:
    """The children of a MultiConnector, in order. One of a kind is enough.

    Args:
        entries: what stands in its list.
        keys: of a KVTransferConfig.
    """
    first: dict[str, str] = {}
    children = []
    for index, entry in enumerate(entries):
        child = _read_child(f"kv_transfer_config.{_EXTRA}.connectors[{index}]", entry, keys)
        if child.name in first:
            problem = Problem(
                "one-of-a-kind", f"{child.path}.kv_connector", child.name,
                f"{first[child.name]} is one already; two would count each block twice.",
                "Leave one out.",
            )  # fmt: skip
            child = replace(child, unreadable=(*child.unreadable, problem))
        elif child.name:
            first[child.name] = child.path
        children.append(child)
    return tuple(children)


def _read_child(path: str, child: object, keys: Sequence[str]) -> Connector:
    """What is no object has no name, no role and no settings."""
    if not isinstance(child, Mapping):
        problem = Problem(
            "child-is-an-object", path, repr(child), "A child connector is a JSON object.",
            'Write {"kv_connector": ..., "kv_role": ...}.',
        )  # fmt: skip
        return Connector(path, name="", role=None, unreadable=(problem,))
    name, extra = str(child.get("kv_connector") or ""), child.get(_EXTRA) or {}
    return Connector(
        path=path,
        name=name,
        role=child.get("kv_role"),
        extra=extra if isinstance(extra, Mapping) else {},
        port=child.get("kv_port", _VLLMS_KV_PORT),
        foreign=_is_foreign(name, child.get("kv_connector_module_path")),
        unreadable=tuple(_child_problems(path, child, keys)),
    )


def _child_problems(path: str, child: Mapping[str, Any], keys: Sequence[str]) -> Iterator[Problem]:
    if not child.get("kv_connector"):
        yield Problem(
            "child-has-a-type", f"{path}.kv_connector", repr(child.get("kv_connector")),
            "Nothing says which connector this child is.", "Name one.",
        )  # fmt: skip
    if child.get("kv_role") not in _ROLES:
        yield Problem(
            "child-has-a-role", f"{path}.kv_role", repr(child.get("kv_role")),
            "A child's role does not come from the wrapper.", f"Give one of {', '.join(_ROLES)}.",
        )  # fmt: skip
    if "engine_id" in child:
        yield Problem(
            "one-engine-id", f"{path}.engine_id", repr(child["engine_id"]),
            "All children share the wrapper's engine id; peers would not find two.",
            "Give kv_transfer_config.engine_id instead, or leave it out.",
        )  # fmt: skip
    if "kv_load_failure_policy" in child:
        yield Problem(
            "one-failure-policy", f"{path}.kv_load_failure_policy",
            repr(child["kv_load_failure_policy"]), "vLLM asks the wrapper alone.",
            "Give kv_transfer_config.kv_load_failure_policy instead.",
        )  # fmt: skip
    extra = child.get(_EXTRA) or {}
    if not isinstance(extra, Mapping):
        yield Problem(
            "extra-is-an-object", f"{path}.{_EXTRA}", repr(extra),
            "A connector's own settings must be a JSON object.",
            'Write {"key": value}, or leave it out.',
        )  # fmt: skip
    for key in sorted(set(map(str, child)) - set(keys)):
        yield Problem(
            "child-keys", f"{path}.{key}", repr(child.get(key)), "There is no such key.",
            nearest(key, keys),
        )  # fmt: skip


def _is_foreign(name: str, module_path: object) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name in OURS or name == MULTI:
        return False
    return module_path is not None or name in KVConnectorFactory._registry
