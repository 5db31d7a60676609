"""A problem of a launch line: option, value, reason, remedy. And the refusal that lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["LaunchRefused", "Problem", "Severity"]


class Severity(StrEnum):
    """Whether the launch is refused or only commented on."""

    REFUSED = "refused"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one option, and what to do about it."""

    rule: str
    option: str
    value: str
    reason: str
    remedy: str
    severity: Severity = Severity.REFUSED

    def __str__(self) -> str:
        return f"[{self.rule}] {self.option} = {self.value}: {self.reason} {self.remedy}"


class LaunchRefused(ValueError):
    """The launch cannot work. Lists every problem that was found, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        noun = "problem" if len(problems) == 1 else "problems"
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        super().__init__(f"KVPP refuses this launch, {len(problems)} {noun}:\n{lines}")
