"""The stores' error codes as outcomes, and answers that are no answers.

A store answers a batch with one integer a key. Whatever else comes back (a short list, None, an
exception out of the binding) is an outcome, too: a broken store costs speed, never a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpp_connectors.pool.store.base import Outcome, Result

__all__ = ["CodeBook", "NoAnswer", "ask"]


class NoAnswer(RuntimeError):
    """A call into a store gave no list of one integer a key."""


@dataclass(frozen=True, slots=True)
class CodeBook:
    """What a store's codes mean."""

    store: str
    meanings: Mapping[int, tuple[Result, str]]

    def outcome(self, code: int) -> Outcome:
        """A code that is not a success. One that nobody knows is FAILED."""
        result, words = self.meanings.get(
            code, (Result.FAILED, f"a code that {self.store} does not explain")
        )
        return Outcome(result, code, words)

    def of_load(self, code: int) -> Outcome:
        """The same for a load, for which what makes a save good ("already there") is a failure."""
        outcome = self.outcome(code)
        return Outcome(Result.FAILED, code, outcome.words) if outcome.ok else outcome


def ask(call: Callable[[], object], keys: Sequence[str], what: str) -> list[int]:
    """Make a call that answers with one integer a key.

    Raises:
        NoAnswer: it answered something else; says what.
    """
    try:
        answer = call()
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise NoAnswer(f"{what} raised {type(error).__name__}: {error}") from error
    if not isinstance(answer, list) or not all(isinstance(code, int) for code in answer):
        raise NoAnswer(f"{what} answered {type(answer).__name__}; expected a list of codes")
    if len(answer) != len(keys):
        raise NoAnswer(f"{what} gave {len(answer)} codes for {len(keys)} keys")
    return answer
