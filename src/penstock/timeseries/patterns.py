"""Regular expressions of queries: RE2, fully anchored, in time linear in the text.

RE2 comes with Arrow and runs over a column of texts. Python's own expressions are not used: they
backtrack, so one query could hold a process for hours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput, Unsupported

__all__ = ["Pattern"]

_REFERENCE: Final = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)\})", re.ASCII)
_GROUP: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|\((?!\?)|\(\?P?<(\w+)>", re.DOTALL)
_REFERENCE_MAX: Final = 9


@dataclass(frozen=True, slots=True)
class Pattern:
    """An expression that has to match a whole text. Raises `InvalidInput` if RE2 refuses it."""

    text: str

    def __post_init__(self) -> None:
        self.matches([""])

    def matches(self, texts: Sequence[str]) -> list[bool]:
        """Which of the texts match as a whole."""
        try:
            found = pc.match_substring_regex(pa.array(texts, pa.string()), pattern=self._anchored)
        except pa.ArrowInvalid as error:
            raise InvalidInput(f"{self.text!r} is not a regular expression: {error}") from None
        matched: list[bool] = found.to_pylist()
        return matched

    def expand(self, texts: Sequence[str], template: str) -> list[str | None]:
        """`template` with `$1`, `${1}` and `$name` filled in from each text; None where one does not match.

        Raises `Unsupported` for a reference to a group beyond the ninth.
        """
        column = pa.array(texts, pa.string())
        replacement = self._replacement(template)
        expanded = pc.replace_substring_regex(column, pattern=self._anchored, replacement=replacement)
        pairs = zip(expanded.to_pylist(), self.matches(texts), strict=True)
        return [text if matched else None for text, matched in pairs]

    @property
    def _anchored(self) -> str:
        return f"^(?s:{self.text})$"

    def _replacement(self, template: str) -> str:
        """The template in RE2's own words: `\\1` for `$1`, nothing for a group that does not exist."""
        groups = [found.group(1) or "" for found in _GROUP.finditer(self.text) if found.group()[0] == "("]

        def refer(found: re.Match[str]) -> str:
            if found.group(1):
                return "$"
            name = found.group(2) or found.group(3)
            number = int(name) if name.isdigit() else groups.index(name) + 1 if name in groups else -1
            if number > len(groups) or number < 0:
                return ""
            if number > _REFERENCE_MAX:
                raise Unsupported(f"${{{name}}}: a reference beyond group {_REFERENCE_MAX} is not supported")
            return f"\\{number}"

        return _REFERENCE.sub(refer, template.replace("\\", "\\\\"))
