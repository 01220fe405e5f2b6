"""Where the text of a query is wrong: the first token after which no continuation can be parsed.

The parser says what is wrong but not where. Continuations are tried from a short list, at a number of
tokens that is found by halves: what can be continued can be continued from every shorter text too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import promql_parser as ast

from penstock.errors import InvalidInput
from penstock.timeseries.patterns import Pattern

__all__ = ["CLOSING", "Token", "parsed", "place_of_error", "place_of_expression", "tokens_of"]

_WORK_MAX: Final = 10_000_000
"""Squares of the lengths of all attempts, which is the time they take: some tenths of a second in all.

Then the best place so far stands: what is before it is right."""

_TOKEN: Final = re.compile(
    r"""[ \t\r\n]+ | \#[^\n]*
    | (?P<token> "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? | `[^`]*`?
    | [A-Za-z_:][\w:.]* | [0-9.][\w.]* (?:(?<=[eE])[+-][0-9]+)? | =~|!~|==|!=|<=|>= | . )""",
    re.VERBOSE | re.DOTALL,
)
CLOSING: Final = {"(": ")", "[": "]", "{": "}"}
_FILLERS: Final = (
    "", " x", "x[5m]", " 1", "[5m]", "5m", '="a"', '"a"', 'a="a"', ' "a"', ",x", ",1,x", ":1m", "() x", "(x)",
    "(x[5m])", " (a) (x)", "(x,1)", "(1,x)", "(1,x[5m])", ",1", ",1,1", ',"a"', ',"a","a"', ',"a","a","a"',
    ',"a","a","a","a"', "start()", 'x,"a","a","a","a"', "1,x", "1,x[5m]", '"a",x',
    '"a","a"', '"a","a","a"', '"a","a","a","a"', "1,1", "x,1",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of a query, and where it starts."""

    text: str
    at: int

    @property
    def end(self) -> int:
        return self.at + len(self.text)


def tokens_of(query: str) -> list[Token]:
    """The pieces of a text, without spaces and comments. Any text has some."""
    found = _TOKEN.finditer(query)
    return [Token(match["token"], match.start()) for match in found if match["token"] is not None]


def place_of_error(query: str, tokens: list[Token], message: str) -> int:
    """The place of the first token that does not fit, or the end of a text that is not finished."""
    if not tokens:
        return 0
    if "regex" in message and (bad_expression := place_of_expression(tokens)) is not None:
        return bad_expression
    return _Search(query, tokens).place()


def place_of_expression(tokens: list[Token]) -> int | None:
    """Where a regular expression is none, to the parser or to RE2."""
    for operator, text in pairwise(tokens):
        if operator.text in ("=~", "!~") and not _is_expression(text.text):
            return text.at
    return None


def _is_expression(literal: str) -> bool:
    try:
        node = parsed(f"x{{a=~{literal}}}")
        if isinstance(node, ast.VectorSelector):
            Pattern(node.matchers.matchers[0].value)
    except (ValueError, InvalidInput):
        return False
    return True


class _Search:
    """The longest start of a query that can be continued."""

    def __init__(self, query: str, tokens: list[Token]) -> None:
        self._query = query
        self._tokens = tokens
        self._starts = self._without_expressions()
        self._work_left = _WORK_MAX

    def place(self) -> int:
        low, high = 0, len(self._tokens)
        while low < high and self._work_left > 0:
            middle = (low + high + 1) // 2
            if self._can_go_on(middle):
                low = middle
            else:
                high = middle - 1
        return self._tokens[low].at if low < len(self._tokens) else self._tokens[-1].end

    def _without_expressions(self) -> list[str]:
        """Each token with what stands before it, expressions, which are slow to compile, replaced."""
        pieces, end, before = [], 0, ""
        for token in self._tokens:
            expression = before in ("=~", "!~") and token.text[:1] in "\"'`"
            pieces.append(self._query[end : token.at] + ('"a"' if expression else token.text))
            end, before = token.end, token.text
        return pieces

    def _can_go_on(self, count: int) -> bool:
        start, closing = "".join(self._starts[:count]), self._closing(count)
        # A comment at the end of a filler takes the closing brackets out.
        for filler in (*_FILLERS, *_second_fillers(closing)):
            self._work_left -= count * count
            if self._work_left > 0 and _parses(start + filler + closing):
                return True
        return False

    def _closing(self, count: int) -> str:
        """The brackets that are still open, closed."""
        waiting: list[str] = []
        for token in self._tokens[:count]:
            if token.text in CLOSING:
                waiting.append(CLOSING[token.text])
            elif waiting and token.text == waiting[-1]:
                waiting.pop()
        return "".join(reversed(waiting))


def _second_fillers(closing: str) -> list[str]:
    """What may have to follow the closing bracket: `sum by (a)` wants its argument, `rate(x{}` its range."""
    if closing.startswith(")"):
        return [f"a{closing[:1]} (x", ") (x", "a) (x", ") x", ") (1,x"]
    if closing.startswith("}"):
        return [f"{matcher}}}[5m]{closing[1:]}#" for matcher in ("", 'a="a"', '="a"', '"a"')]
    return []


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


def _parses(text: str) -> bool:
    try:
        parsed(text)
    except (ValueError, OverflowError, RecursionError):
        return False
    return True
