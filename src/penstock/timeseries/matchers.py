"""Regular expressions of queries: RE2, fully anchored, with linear matching time.

RE2 comes with Arrow and matches a column of texts. Python's `re` is not used: it backtracks, so one query
could block a process for hours.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput, LimitExceeded, Unsupported
from penstock.timeseries.model import LABEL_BYTES_MAX, Labels

_REFERENCE: Final = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)\})", re.ASCII)
_GROUP: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|\((?!\?)|\(\?P?<(\w+)>", re.DOTALL)
_REFERENCE_MAX: Final = 9
_PIECE_CHARACTERS: Final = LABEL_BYTES_MAX
"""Characters matched between two checks of the time limit. The slowest expressions take 0.4 s for them."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """An expression that must match a whole text. Raises `InvalidInput` if RE2 refuses it."""

    text: str

    def __post_init__(self) -> None:
        self.matches([""])

    def matches(self, texts: Sequence[str], check: Callable[[], None] | None = None) -> list[bool]:
        """Return which texts match as a whole.

        `check` is called periodically and may raise to stop the work.
        """
        matched: list[bool] = []
        for piece in [texts] if check is None else pieces(texts):
            if check is not None:
                check()
            try:
                found = pc.match_substring_regex(pa.array(piece, pa.string()), pattern=self._anchored)
            except pa.ArrowInvalid as error:
                raise InvalidInput(f"{self.text!r} is not a regular expression: {error}") from None
            matched += found.to_pylist()
        return matched

    def expand(
        self, texts: Sequence[str], template: str, *, characters_max: int = LABEL_BYTES_MAX
    ) -> list[str | None]:
        """Fill `$1`, `${1}` and `$name` in `template` from each text. The result is None where a text does
        not match.

        Raises `LimitExceeded` before it creates a text longer than `characters_max`, and `Unsupported` for a
        reference to a group after the ninth.
        """
        parts = self._parts(template)
        column = pa.array(texts, pa.string())
        references = Counter(part for part in parts if isinstance(part, int))
        literal = sum(len(part) for part in parts if isinstance(part, str))
        captured = {group: self._captured(column, group) for group in references}
        expanded: list[str | None] = []
        for row, matched in enumerate(self.matches(texts)):
            if not matched:
                expanded.append(None)
                continue
            size = literal + sum(count * len(captured[group][row]) for group, count in references.items())
            if size > characters_max:
                raise LimitExceeded(f"{size:,} characters; at most {characters_max:,} are allowed")
            expanded.append("".join(part if isinstance(part, str) else captured[part][row] for part in parts))
        return expanded

    def _captured(self, column: pa.StringArray, group: int) -> list[str]:
        """Return the group's match in each text. It is never longer than the text itself."""
        found: list[str] = pc.replace_substring_regex(
            column, pattern=self._anchored, replacement=f"\\{group}"
        ).to_pylist()
        return found

    @property
    def _anchored(self) -> str:
        return f"^(?s:{self.text})$"

    def _parts(self, template: str) -> list[str | int]:
        """Split the template into texts and group numbers, without references to groups that do not exist."""
        groups = [found.group(1) or "" for found in _GROUP.finditer(self.text) if found.group()[0] == "("]

        def refer(found: re.Match[str]) -> str | int:
            if found.group(1):
                return "$"
            name = found.group(2) or found.group(3)
            number = int(name) if name.isdigit() else groups.index(name) + 1 if name in groups else -1
            if number > len(groups) or number < 0:
                return ""
            if number > _REFERENCE_MAX:
                raise Unsupported(f"${{{name}}}: a reference beyond group {_REFERENCE_MAX} is not supported")
            return number

        parts: list[str | int] = []
        end = 0
        for found in _REFERENCE.finditer(template):
            parts += [template[end : found.start()], refer(found)]
            end = found.end()
        return [part for part in (*parts, template[end:]) if part != ""]


def pieces(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield all texts in order, in slices of bounded length. A longer text is a separate slice."""
    first = size = 0
    for row, text in enumerate(texts):
        size += 16 + len(text)
        if size >= _PIECE_CHARACTERS:
            yield texts[first : row + 1]
            first, size = row + 1, 0
    if first < len(texts):
        yield texts[first:]


class MatchOp(enum.Enum):
    """The comparison of a label's value."""

    EQUAL = "="
    NOT_EQUAL = "!="
    REGEX = "=~"
    NOT_REGEX = "!~"


@dataclass(frozen=True, slots=True)
class Matcher:
    """A condition on one label. A missing label has the empty value.

    Raises `InvalidInput` if its value must be a regular expression but is not valid.
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
        """Return which values satisfy the matcher.

        `look` is called periodically and may raise to stop the work.
        """
        if self.op is MatchOp.EQUAL:
            return [value == self.value for value in values]
        if self.op is MatchOp.NOT_EQUAL:
            return [value != self.value for value in values]
        matched = _pattern(self.value).matches(values, look)
        return [not found for found in matched] if self.negative else matched

    @property
    def accepts_missing(self) -> bool:
        """True if a series without the label matches. The inverted index alone cannot decide then."""
        return self.accepts([""])[0]

    def __str__(self) -> str:
        return f'{self.name}{self.op.value}"{self.value}"'


def select_labels(
    matchers: Sequence[Matcher], candidates: Sequence[Labels], check: Callable[[], None] | None = None
) -> list[int]:
    """Return the positions of the candidates that satisfy all matchers.

    Each matcher tests every distinct value once. `check` is `look` of `Matcher.accepts`.
    """
    left = list(range(len(candidates)))
    for matcher in matchers:
        values = [candidates[position].value(matcher.name) for position in left]
        distinct = sorted(set(values))
        accepted = dict(zip(distinct, matcher.accepts(distinct, check), strict=True))
        left = [position for position, value in zip(left, values, strict=True) if accepted[value]]
    return left


@lru_cache(maxsize=256)
def _pattern(text: str) -> Pattern:
    return Pattern(text)
