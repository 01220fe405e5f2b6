"""From the text of a query to its tree, or to what is wrong with it and where."""

from __future__ import annotations

from typing import Final

import promql_parser as ast

from penstock.timeseries.promql.error_place import CLOSING, Token, place_of_error, tokens_of
from penstock.timeseries.promql.errors import ParseError, UnsupportedQuery

__all__ = ["NESTING_MAX", "QUERY_CHARACTERS_MAX", "TOKENS_MAX", "parse"]

QUERY_CHARACTERS_MAX: Final = 65_536
TOKENS_MAX: Final = 2_000
"""The parser takes time by the square of a chain of operators; this many take a third of a second."""
NESTING_MAX: Final = 100
"""Trees are walked by recursion, here and in the parser, so depth is bounded before anything is parsed."""


def parse(query: str) -> ast.Expr:
    """The tree of a query.

    Raises `ParseError` with the place of what is wrong, and `UnsupportedQuery` for what the parser
    reads wrongly.
    """
    tokens = tokens_of(query)
    _check_size(query, tokens)
    try:
        tree: ast.Expr = ast.parse(query)
    except (ValueError, OverflowError) as error:
        raise _at(query, place_of_error(query, tokens, str(error)), str(error)) from None
    except RecursionError:
        raise ParseError("the expression is nested too deeply", 1, 1) from None
    return tree


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
