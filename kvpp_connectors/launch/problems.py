"""A problem of a launch line: option, value, reason, remedy. And the refusal that lists them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvpp_connectors.connector.options import Complaint

__all__ = ["LaunchRefused", "Problem", "Severity", "refusals_first"]


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

    @classmethod
    def of(cls, complaint: Complaint, rule: str) -> Problem:
        """The problem that an option which cannot be used is; ``rule`` if it names none."""
        c = complaint
        return cls(c.rule or rule, c.option, c.value, c.reason, c.remedy)

    def __str__(self) -> str:
        return f"[{self.rule}] {self.option} = {self.value}: {self.reason} {self.remedy}"


class LaunchRefused(ValueError):
    """The launch cannot work. Lists every problem that was found, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        noun = "problem" if len(problems) == 1 else "problems"
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        super().__init__(f"KVPP refuses this launch, {len(problems)} {noun}:\n{lines}")


def refusals_first(problems: Iterable[Problem]) -> list[Problem]:
    """The problems in their order, warnings last."""
    return sorted(problems, key=lambda problem: problem.severity is Severity.WARNING)
