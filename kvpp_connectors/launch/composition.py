"""What a MultiConnector with children of ours may be made of; checked before weights are loaded.

These rules hold with KVPP and without. What KVPP asks of each child besides stands in
launch/rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvpp_connectors.connector.options import nearest
from kvpp_connectors.launch.problems import Problem
from kvpp_connectors.plugin import children_of

__all__ = ["check_composition"]

_ROLES = ("kv_producer", "kv_consumer", "kv_both")


def check_composition(
    transfer: Any, known: tuple[str, ...], check_settings: Callable[[str, Any, str], list[Problem]]
) -> list[Problem]:
    """All problems of a MultiConnector's children; names each by its place in the list.

    Args:
        transfer: the wrapper's KVTransferConfig.
        known: the keys of a KVTransferConfig.
        check_settings: checks a connector's own settings: its type, the settings, its path.
    """
    children = children_of(transfer)
    problems = [p for path, child in children for p in _child_problems(path, child, known)]
    problems += _repeated(children)
    for path, child in children:
        if isinstance(child, Mapping) and not any(p.option.startswith(path) for p in problems):
            extra = child.get("kv_connector_extra_config") or {}
            problems += check_settings(child["kv_connector"], extra, path)
    return problems


def _child_problems(path: str, child: object, known: tuple[str, ...]) -> Iterator[Problem]:
    if not isinstance(child, Mapping):
        yield Problem(
            "child-is-an-object", path, repr(child), "A child connector is a JSON object.",
            'Write {"kv_connector": ..., "kv_role": ...}.',
        )  # fmt: skip
        return
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
    for key in sorted(set(map(str, child)) - set(known)):
        yield Problem(
            "child-keys", f"{path}.{key}", repr(child.get(key)), "There is no such key.",
            nearest(key, known),
        )  # fmt: skip


def _repeated(children: list[tuple[str, Any]]) -> list[Problem]:
    seen: dict[str, str] = {}
    problems = []
    for path, child in children:
        name = _name(child)
        if name in seen:
            reason = f"{seen[name]} is one already; two would count each block twice."
            option = f"{path}.kv_connector"
            problems.append(Problem("one-of-a-kind", option, name, reason, "Leave one out."))
        elif name is not None:
            seen[name] = path
    return problems


def _name(child: Any) -> Any:
    return child.get("kv_connector") if isinstance(child, Mapping) else None
