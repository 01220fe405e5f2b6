"""From the text of a query to its tree, or to what is wrong with it and where."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import promql_parser as ast

from penstock.timeseries.promql.error_place import (
    Token,
    place_of_error,
    place_of_expression,
    text_to_parse,
    tokens_of,
    without_expressions,
)
from penstock.timeseries.promql.limits import ParseError, UnsupportedQuery
from penstock.timeseries.promql.parser import CLOSING, parsed

__all__ = [
    "NESTING_MAX",
    "QUERY_CHARACTERS_MAX",
    "TOKENS_MAX",
    "bad_expression",
    "is_read_at_once",
    "out_of_range",
    "parse",
]

QUERY_CHARACTERS_MAX: Final = 65_536
TOKENS_MAX: Final = 2_000
"""The parser takes time by the square of a chain of operators; this many take a third of a second."""
_DURATION_MAX: Final = timedelta(milliseconds=2**53)
_SECONDS_MAX: Final = 1e13
NESTING_MAX: Final = 100
"""Trees are walked by recursion, here and in the parser, so depth is bounded before anything is parsed."""


_AT_ONCE_CHARACTERS: Final = 100


def is_read_at_once(*texts: str) -> bool:
    """Whether queries or selectors are read within some milliseconds, the place of an error included.

    Long ones are not, and neither are those with regular expressions: one may take a tenth of a second.
    """
    return sum(map(len, texts)) < _AT_ONCE_CHARACTERS and not any("~" in text for text in texts)


def parse(query: str) -> ast.Expr:
    """The tree of a query.

    Raises `ParseError` with the place of what is wrong, and `UnsupportedQuery` for what the parser
    reads wrongly.
    """
    tokens = tokens_of(query)
    _check_size(query, tokens)
    _check_durations(query, tokens)
    tokens = without_expressions(tokens)
    try:
        return parsed(text_to_parse(query, tokens))
    except (ValueError, OverflowError) as error:
        raise _at(query, place_of_error(query, tokens, str(error)), str(error)) from None
    except RecursionError:
        raise ParseError("the expression is nested too deeply", 1, 1) from None


def out_of_range(query: str) -> ParseError:
    """The error of a query of which a duration, or a time behind `@`, does not fit a timestamp."""
    tokens = tokens_of(query)
    for before, token in zip(["", *(token.text for token in tokens)], tokens, strict=False):
        text = token.text.lstrip(":")
        if text[:1].isdigit() and _overflows(text, behind_at=before == "@"):
            what = "the time behind @" if before == "@" else f"the duration {text}"
            return _at(query, token.end - len(text), f"{what} is out of range")
    return ParseError("a duration or a time is out of range", 1, 1)


def bad_expression(query: str, message: str) -> ParseError:
    """The error of a query whose regular expression is none."""
    return _at(query, place_of_expression(tokens_of(query)) or 0, message)


def _overflows(text: str, *, behind_at: bool) -> bool:
    try:
        node = parsed(f"x @ {text}" if behind_at else f"x[{text}]")
    except (ValueError, OverflowError):
        return False
    try:
        if isinstance(node, ast.VectorSelector):
            return node.at is None or node.at.at is None
        return isinstance(node, ast.MatrixSelector) and node.range > _DURATION_MAX
    except (ValueError, OverflowError):
        return True


def _check_durations(query: str, tokens: list[Token]) -> None:
    """Numbers that are no duration at all are found here: the parser breaks on them."""
    before, in_brackets = "", False
    for token in tokens:
        in_brackets = token.text == "[" or (in_brackets and token.text != "]")
        text = token.text.lstrip(":")
        if (in_brackets or before == "offset") and _is_endless(text):
            raise _at(query, token.end - len(text), f"the duration {text} is out of range")
        before = before if token.text in "+-" else token.text.lower()


def _is_endless(text: str) -> bool:
    try:
        return not abs(float(text)) < _SECONDS_MAX  # NaN is not smaller than anything
    except ValueError:
        return False


def _check_size(query: str, tokens: list[Token]) -> None:
    if len(query) > QUERY_CHARACTERS_MAX or len(tokens) > TOKENS_MAX:
        limits = f"{QUERY_CHARACTERS_MAX:,} characters or {TOKENS_MAX:,} tokens"
        raise ParseError(f"the query is longer than {limits}", 1, 1)
    depth = run = 0
    before = ""
    for token in tokens:
        depth += (token.text in CLOSING) - (token.text in ")]}")
        # Signs and operators that follow one another nest as well.
        run = run + 1 if token.text in "+-" else 0
        if depth > NESTING_MAX or run > NESTING_MAX:
            raise _at(query, token.at, "the expression is nested too deeply")
        if before == "@" and token.text == "-":
            raise UnsupportedQuery("a time before 1970 behind @ is not supported")
        before = token.text


def _at(query: str, place: int, message: str) -> ParseError:
    before = query[:place]
    line = before.count("\n") + 1
    return ParseError(message, line, place - (before.rfind("\n") + 1) + 1)
