"""Matchers of a selector: which label must, or must not, have which value."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from penstock.timeseries.model import Labels
from penstock.timeseries.patterns import Pattern

__all__ = ["MatchOp", "Matcher", "matches_all", "select_labels"]


class MatchOp(enum.Enum):
    """How a label's value is compared."""

    EQUAL = "="
    NOT_EQUAL = "!="
    REGEX = "=~"
    NOT_REGEX = "!~"


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on one label; a label that is not there has the empty value.

    Raises `InvalidInput` if its value has to be an expression and is none.
    """

    op: MatchOp
    name: str
    value: str

    def __post_init__(self) -> None:
        if self.op in (MatchOp.REGEX, MatchOp.NOT_REGEX):
            _pattern(self.value)

    @property
    def negative(self) -> bool:
        return self.op in (MatchOp.NOT_EQUAL, MatchOp.NOT_REGEX)

    def accepts(self, values: Sequence[str], look: Callable[[], None] | None = None) -> list[bool]:
        """Which of the values satisfy it. `look` is called now and then, and may raise to end the work."""
        if self.op is MatchOp.EQUAL:
            return [value == self.value for value in values]
        if self.op is MatchOp.NOT_EQUAL:
            return [value != self.value for value in values]
        matched = _pattern(self.value).matches(values, look)
        return [not found for found in matched] if self.negative else matched

    @property
    def accepts_missing(self) -> bool:
        """Whether a series without the label satisfies it: then the inverted index alone cannot answer."""
        return self.accepts([""])[0]

    def __str__(self) -> str:
        return f'{self.name}{self.op.value}"{self.value}"'


def matches_all(matchers: Iterable[Matcher], labels: Labels) -> bool:
    """Whether one series satisfies all of the matchers."""
    return all(matcher.accepts([labels.value(matcher.name)])[0] for matcher in matchers)


def select_labels(
    matchers: Sequence[Matcher], candidates: Sequence[Labels], look: Callable[[], None] | None = None
) -> list[int]:
    """The positions of those candidates that satisfy all of the matchers.

    Each matcher sees every distinct value once. `look` is as in `Matcher.accepts`.
    """
    left = list(range(len(candidates)))
    for matcher in matchers:
        values = [candidates[position].value(matcher.name) for position in left]
        distinct = sorted(set(values))
        accepted = dict(zip(distinct, matcher.accepts(distinct, look), strict=True))
        left = [position for position, value in zip(left, values, strict=True) if accepted[value]]
    return left


@lru_cache(maxsize=256)
def _pattern(text: str) -> Pattern:
    return Pattern(text)
