"""The parser, and what is kept away from it.

It compiles regular expressions with the tables of all of Unicode, and holds the interpreter meanwhile: some
hundred characters would stop a server for seconds. So it is never given those of a query. RE2 has the verdict
on them, and in the text that is parsed a word stands for each, which holds it, and which matches the empty
text if the expression does: a selector needs a condition that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import promql_parser as ast

from penstock.errors import InvalidInput
from penstock.timeseries.matchers import Pattern

_MARK: Final = "re"
_EMPTY: Final = "|"


def parsed(text: str) -> ast.Expr:
    """The parser's tree. Raises `ValueError`, `OverflowError`, `RecursionError`; a panic is a `ValueError`.

    Otherwise a panic would pass every handler of errors, and end whatever asked.
    """
    try:
        tree: ast.Expr = ast.parse(text)
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(f"the parser cannot read it: {error}") from None
        raise
    return tree


def text_of(literal: str) -> str | None:
    """What a literal in quotes says; None if it is none."""
    if literal[:1] == "`":
        return literal[1:-1] if literal[1:].endswith("`") else None
    try:
        node = parsed(f"x{{a={literal}}}")
    except ValueError:
        return None
    assert isinstance(node, ast.VectorSelector)
    return node.matchers.matchers[0].value


def in_plain_quotes(literal: str) -> str:
    """A literal in backticks, where the parser sees escapes though there are none, as it reads it rightly."""
    text = text_of(literal)
    if text is None:
        return literal
    for character, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(character, escaped)
    return f'"{text}"'


def word_for(literal: str) -> str:
    """What the parser is given for the literal of a regular expression; the same if it is no literal."""
    text = text_of(literal)
    if text is None:
        return literal
    try:
        (is_empty,) = Pattern(text).matches([""])
    except InvalidInput:
        is_empty = False  # whoever makes a matcher of it is told
    return f'"{_MARK}{text.encode().hex()}{_EMPTY if is_empty else ""}"'


def expression_in(word: str) -> str:
    """The regular expression that the word in a tree stands for."""
    return bytes.fromhex(word.removeprefix(_MARK).removesuffix(_EMPTY)).decode()


_POWERS: Final = {
    "or": 1, "and": 2, "unless": 2, "==": 3, "!=": 3, "<": 3, "<=": 3, ">": 3, ">=": 3,
    "+": 4, "-": 4, "*": 5, "/": 5, "%": 5, "atan2": 5, "^": 6,
}  # fmt: skip
_POWER_OF_SIGNS: Final = 6
"""A sign binds less than `^` and more than anything else."""
CLOSING: Final = {"(": ")", "[": "]", "{": "}"}
_GROUPS: Final = ("by", "without")
_MATCHINGS: Final = ("on", "ignoring", "group_left", "group_right")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An expression within a query: its tokens from `first` up to `end`, and what it is made of."""

    first: int
    end: int
    mark: int
    """The token that makes it what it is: its operator or bracket, otherwise its first."""
    parts: tuple[Part, ...] = ()


def outline(tokens: Sequence[str]) -> list[Part]:
    """Every expression of a query, each behind those that it is made of.

    Empty if the text is no query, as far as this looks at it.
    """
    reader = _Reader(tokens)
    try:
        reader.expression(0)
    except (IndexError, RecursionError, _Misread):
        return []
    return reader.found if reader.at == len(tokens) else []


class _Misread(Exception):
    """Something else stands where an expression should."""


class _Reader:
    def __init__(self, tokens: Sequence[str]) -> None:
        self.at = 0
        self.found: list[Part] = []
        self._tokens = tokens

    def expression(self, power_min: int) -> Part:
        part = self._signed()
        while (power := _POWERS.get(self._word(), 0)) >= max(power_min, 1):
            mark = self._next()
            self._skip_matching()
            right = self.expression(power if self._tokens[mark] == "^" else power + 1)
            part = self._made(part.first, mark, part, right)
        return part

    def _signed(self) -> Part:
        if self._word() not in ("+", "-"):
            return self._behind(self._plain())
        mark = self._next()
        return self._made(mark, mark, self.expression(_POWER_OF_SIGNS))

    def _plain(self) -> Part:
        first = self.at
        start = self._tokens[first]
        if start == "(":
            self._next()
            inner = self.expression(0)
            self._expect(")")
            return self._made(first, first, inner)
        if start == "{":
            self._skip_bracket()
            return self._made(first, first)
        if not (start[0].isalnum() or start[0] in "_:.\"'`"):
            raise _Misread
        self._next()
        return self._named(first) if start[0].isalpha() or start[0] in "_:" else self._made(first, first)

    def _named(self, first: int) -> Part:
        """A selector, a call or an aggregation: whatever starts with a name."""
        if self._word() in _GROUPS and self._follows("("):
            self._skip_labels()
        if self._word() != "(":
            if self._word() == "{":
                self._skip_bracket()
            return self._made(first, first)
        arguments = self._arguments()
        if self._word() in _GROUPS:
            self._skip_labels()
        return self._made(first, first, *arguments)

    def _arguments(self) -> list[Part]:
        self._expect("(")
        arguments: list[Part] = []
        while self._word() != ")":
            arguments.append(self.expression(0))
            if self._word() == ",":
                self._next()
        self._expect(")")
        return arguments

    def _behind(self, part: Part) -> Part:
        """With the ranges, offsets and times that follow it."""
        while (word := self._word()) in ("[", "offset", "@"):
            mark = self.at
            if word == "[":
                self._skip_bracket()
            else:
                self._next()
                while self._word() in ("+", "-"):
                    self._next()
                self._next()
                if self._word() == "(":
                    self._skip_bracket()
            part = self._made(part.first, mark, part)
        return part

    def _skip_matching(self) -> None:
        """What may stand between an operator and its right side."""
        while self._word() == "bool" or self._word() in _MATCHINGS:
            if self._word() == "bool":
                self._next()
            else:
                self._skip_labels()

    def _skip_labels(self) -> None:
        self._next()
        if self._word() == "(":
            self._skip_bracket()

    def _skip_bracket(self) -> None:
        waiting = [CLOSING[self._tokens[self._next()]]]
        while waiting:
            token = self._tokens[self._next()]
            if token in CLOSING:
                waiting.append(CLOSING[token])
            elif token == waiting[-1]:
                waiting.pop()

    def _made(self, first: int, mark: int, *parts: Part) -> Part:
        part = Part(first=first, end=self.at, mark=mark, parts=parts)
        self.found.append(part)
        return part

    def _word(self) -> str:
        return self._tokens[self.at].lower() if self.at < len(self._tokens) else ""

    def _follows(self, token: str) -> bool:
        return self.at + 1 < len(self._tokens) and self._tokens[self.at + 1] == token

    def _next(self) -> int:
        """The place of this token; the one behind it is next. Raises `IndexError` at the end."""
        if self.at >= len(self._tokens):
            raise IndexError
        self.at += 1
        return self.at - 1

    def _expect(self, token: str) -> None:
        if self._word() != token:
            raise _Misread
        self._next()
