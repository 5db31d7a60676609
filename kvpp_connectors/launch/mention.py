"""Whether a launch mentions this package at all.

Asked of every launch of vLLM, so nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvpp_connectors.connector.names import MULTI, OURS, P2P, POOL, SWITCH

__all__ = [
    "child_configs",
    "has_our_connector",
    "mentions_us",
    "nearest_connector",
    "resembles_our_key",
]

_TYPING_ERROR = 0.85  # two letters swapped or one wrong; enable_kv_nz, of others, is at 0.78


def mentions_us(vllm_config: Any) -> bool:
    """Whether the worker class, a connector or a key is ours, or may be a misspelt one of ours."""
    if str(vllm_config.parallel_config.worker_cls).startswith("kvpp_connectors."):
        return True
    names = list(_connector_names(vllm_config.kv_transfer_config))
    if any(name != MULTI and nearest_connector(name) for name in names):
        return True
    additional_config = vllm_config.additional_config  # vLLM takes any object with a hash
    return isinstance(additional_config, dict) and any(map(resembles_our_key, additional_config))


def has_our_connector(transfer: Any) -> bool:
    """Whether the connector of a KVTransferConfig, or a child of a MultiConnector, is ours."""
    return any(name in OURS for name in _connector_names(transfer))


def child_configs(name: object, extra: Mapping[str, Any]) -> list[Any]:
    """What stands in the list of a MultiConnector's children, in order."""
    listed = extra.get("connectors") if name == MULTI else None
    return listed if isinstance(listed, list) else []


def resembles_our_key(key: object) -> bool:
    """Whether a key of additional_config is one of ours, or looks like one that is misspelt."""
    text = str(key).lower()
    return "kvp" in text or _is_near(text, SWITCH)


def nearest_connector(name: str) -> str | None:
    """The connector that ``name`` may be a misspelling of, of those that this package serves."""
    served = (P2P, POOL, MULTI)
    return next((ours for ours in served if _is_near(name.lower(), ours.lower())), None)


def _connector_names(transfer: Any) -> Iterator[str]:
    if transfer is None:
        return
    yield str(transfer.kv_connector)
    for child in child_configs(transfer.kv_connector, transfer.kv_connector_extra_config):
        if isinstance(child, Mapping):
            yield str(child.get("kv_connector"))


def _is_near(text: str, ours: str) -> bool:
    from difflib import get_close_matches

    return bool(get_close_matches(text, [ours], cutoff=_TYPING_ERROR))
