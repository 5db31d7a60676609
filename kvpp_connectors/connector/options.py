"""How options are complained of: each key by name, and what is expected there."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

__all__ = ["complaints", "nearest"]


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
