"""Reads an object of options into a typed value: all wrong keys at once, each with its remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from kvpp_connectors.log import get_logger
from kvpp_core.errors import KvppError

__all__ = [
    "Complaint",
    "OptionsError",
    "contradiction",
    "log_idle_keys",
    "nearest",
    "read_extra_config",
    "read_model",
]

logger = get_logger(__name__)

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong with one option. ``rule`` names a contradiction between two of them."""

    option: str
    value: str
    reason: str
    remedy: str
    rule: str | None = None

    def __str__(self) -> str:
        return f"{self.option} = {self.value}: {self.reason} {self.remedy}"


class OptionsError(KvppError):
    """Options that cannot be used. Lists every one of them."""

    def __init__(self, complaints: Iterable[Complaint]) -> None:
        self.complaints = tuple(complaints)
        super().__init__("; ".join(map(str, self.complaints)))


def nearest(word: str, known: Sequence[str]) -> str:
    """``Did you mean 'x'?`` for the nearest of ``known``, or the whole list."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return f"Did you mean {lower[close[0]]!r}?" if close else f"Known: {', '.join(sorted(known))}."


def contradiction(rule: str, reason: str, remedy: str) -> PydanticCustomError:
    """For validators of a field that does not go with another one."""
    return PydanticCustomError(
        "contradiction", "{reason}", {"rule": rule, "reason": reason, "remedy": remedy}
    )


def read_extra_config(
    model: type[Model], extra: object, path: str, idle: Mapping[str, str]
) -> Model:
    """A connector's ``kv_connector_extra_config`` as typed options.

    Args:
        model: the options.
        extra: what the launch gives.
        path: where it stands in the launch.
        idle: keys that other packages' connectors know and that decide nothing here, with why.

    Raises:
        OptionsError: names each key that is unknown or has a wrong value, and what is expected.
    """
    return read_model(model, extra, f"{path}.", tuple(idle))


def log_idle_keys(extra: Mapping[str, Any], idle: Mapping[str, str]) -> None:
    """Log each idle key that the launch gives. For one process of an engine."""
    for key in sorted(idle.keys() & extra.keys()):
        logger.info("kv_connector_extra_config.%s decides nothing: %s", key, idle[key])


def read_model(model: type[Model], values: object, prefix: str, idle: Sequence[str] = ()) -> Model:
    """The options, checked.

    Args:
        model: what they are read into; the descriptions of its fields say what is expected.
        values: what stands there.
        prefix: comes before each key's name, with its separator.
        idle: keys that are accepted and decide nothing.

    Raises:
        OptionsError: names each key that is unknown or has a wrong value.
    """
    if not isinstance(values, Mapping):
        reason = f"This is {type(values).__name__}; expected an object of settings."
        whole = Complaint(prefix.rstrip(".: "), repr(values), reason, 'Write {"key": value}.')
        raise OptionsError([whole])
    try:
        return model.model_validate({k: v for k, v in values.items() if k not in idle})
    except ValidationError as error:
        known = (*model.model_fields, *idle)
        raise OptionsError(
            _complaint(detail, model, prefix, known) for detail in error.errors()
        ) from error


def _complaint(detail: Any, model: type[BaseModel], prefix: str, known: Sequence[str]) -> Complaint:
    key = ".".join(str(part) for part in detail["loc"])
    option, value = f"{prefix}{key}" if key else prefix.rstrip(".: "), repr(detail["input"])
    if detail["type"] == "contradiction":
        context = detail["ctx"]
        return Complaint(option, value, context["reason"], context["remedy"], context["rule"])
    if detail["type"] == "extra_forbidden":
        return Complaint(option, value, "There is no such key.", nearest(key, known))
    field = model.model_fields.get(key) or model.model_fields.get(key.partition(".")[0])
    remedy = f"Expected: {field.description}." if field else "Correct or remove it."
    if detail["type"] == "missing":
        return Complaint(option, "nothing", "It is missing.", remedy)
    return Complaint(option, value, f"{detail['msg'].removeprefix('Value error, ')}.", remedy)
