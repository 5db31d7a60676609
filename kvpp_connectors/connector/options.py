"""Reading a connector's options, and what is said of a key that is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvpp_connectors.log import get_logger
from kvpp_core.errors import KvppError

__all__ = ["complaints", "log_idle_keys", "nearest", "read_extra_config"]

logger = get_logger(__name__)

Options = TypeVar("Options", bound=BaseModel)


def read_extra_config(
    model: type[Options], extra: Mapping[str, Any], path: str, idle: Mapping[str, str]
) -> Options:
    """A connector's ``kv_connector_extra_config`` as typed options.

    Args:
        model: the options.
        extra: what the launch gives.
        path: where it stands in the launch.
        idle: keys that other packages' connectors know and that decide nothing here, with why.

    Raises:
        KvppError: names each key that is unknown or has a wrong value, and what is expected.
    """
    try:
        return model.model_validate({k: v for k, v in extra.items() if k not in idle})
    except ValidationError as error:
        raise KvppError(complaints(error, model, path, tuple(idle))) from error


def log_idle_keys(extra: Mapping[str, Any], idle: Mapping[str, str]) -> None:
    """Log each idle key that the launch gives. For one process of an engine."""
    for key in sorted(idle.keys() & extra.keys()):
        logger.info("kv_connector_extra_config.%s decides nothing: %s", key, idle[key])


def nearest(word: str, known: Sequence[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest of ``known``, or the whole list."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(known))}."


def complaints(
    error: ValidationError, model: type[BaseModel], source: str, idle: Sequence[str] = ()
) -> str:
    """What is wrong with each key of ``source``, and what is expected there.

    ``idle``: keys that are taken besides the model's.
    """
    return "; ".join(_complaint(detail, model, source, idle) for detail in error.errors())


def _complaint(detail: Any, model: type[BaseModel], source: str, idle: Sequence[str]) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        known = (*model.model_fields, *idle)
        return f"{source}: there is no key {key!r}. {nearest(key, known)}"
    if not key:
        return f"{source}: {detail['msg'].removeprefix('Value error, ')}"
    field = model.model_fields.get(key.split(".", maxsplit=1)[0])
    expected = f" Expected: {field.description}." if field else ""
    given = (
        "is missing" if detail["type"] == "missing" else f"= {detail['input']!r}: {detail['msg']}"
    )
    return f"{source}: {key} {given}.{expected}"
