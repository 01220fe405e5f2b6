"""From the text of a query to its tree, and where the text is wrong.

The parser says what is wrong but not where. The place is found here: the first token after which no
continuation of the text can be parsed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import promql_parser as ast

from penstock.timeseries.promql.errors import ParseError, UnsupportedQuery

__all__ = ["NESTING_MAX", "QUERY_CHARACTERS_MAX", "TOKENS_MAX", "parse"]

QUERY_CHARACTERS_MAX: Final = 65_536
TOKENS_MAX: Final = 5_000
NESTING_MAX: Final = 100
"""Trees are walked by recursion, here and in the parser, so depth is bounded before anything is parsed."""

_TOKEN: Final = re.compile(
    r"""[ \t\r\n]+ | \#[^\n]*
    | (?P<token> "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? | `[^`]*`?
    | [A-Za-z_:][\w:.]* | [0-9.][\w.]* (?:(?<=[eE])[+-][0-9]+)? | =~|!~|==|!=|<=|>= | . )""",
    re.VERBOSE | re.DOTALL,
)
_CLOSING: Final = {"(": ")", "[": "]", "{": "}"}
_FILLERS: Final = (
    "", " x", "x[5m]", " 1", "[5m]", "5m", '="a"', '"a"', 'a="a"', ' "a"', ",x", ",1,x", ":1m", "() x", "(x)",
    "(x[5m])", " (a) (x)", "(x,1)", "(1,x)", "(1,x[5m])", ",1", ",1,1", ',"a"', ',"a","a"', ',"a","a","a"',
    ',"a","a","a","a"', "start()", 'x,"a","a","a","a"', "1,x", "1,x[5m]", '"a",x',
    '"a","a"', '"a","a","a"', '"a","a","a","a"', "1,1", "x,1",
)  # fmt: skip


def parse(query: str) -> ast.Expr:
    """The tree of a query.

    Raises `ParseError` with the place of what is wrong, and `UnsupportedQuery` for what the parser
    reads wrongly.
    """
    tokens = _tokens(query)
    _check_size(query, tokens)
    try:
        tree: ast.Expr = ast.parse(query)
    except (ValueError, OverflowError) as error:
        raise _located(query, tokens, str(error)) from None
    except RecursionError:
        raise ParseError("the expression is nested too deeply", 1, 1) from None
    return tree


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    at: int

    @property
    def end(self) -> int:
        return self.at + len(self.text)


def _tokens(query: str) -> list[_Token]:
    found = _TOKEN.finditer(query)
    return [_Token(match["token"], match.start()) for match in found if match["token"] is not None]


def _check_size(query: str, tokens: list[_Token]) -> None:
    if len(query) > QUERY_CHARACTERS_MAX or len(tokens) > TOKENS_MAX:
        raise ParseError(f"the query is longer than {TOKENS_MAX} tokens", 1, 1)
    depth = run = 0
    before = ""
    for token in tokens:
        depth += (token.text in _CLOSING) - (token.text in ")]}")
        # Signs and operators that follow one another nest as well.
        run = run + 1 if token.text in "+-" else 0
        if depth > NESTING_MAX or run > NESTING_MAX:
            raise _at(query, token.at, "the expression is nested too deeply")
        if before == "@" and token.text == "-":
            raise UnsupportedQuery("a time before 1970 behind @ is not supported")
        before = token.text


def _located(query: str, tokens: list[_Token], message: str) -> ParseError:
    """By halves: what can be continued can be continued from every shorter text too."""
    if not tokens:
        return ParseError(message, 1, 1)
    low, high = 0, len(tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if _can_go_on(query, tokens[:middle]):
            low = middle
        else:
            high = middle - 1
    return _at(query, tokens[low].at if low < len(tokens) else tokens[-1].end, message)


def _can_go_on(query: str, tokens: list[_Token]) -> bool:
    open_brackets: list[str] = []
    for token in tokens:
        if token.text in _CLOSING:
            open_brackets.append(_CLOSING[token.text])
        elif open_brackets and token.text == open_brackets[-1]:
            open_brackets.pop()
    closing = "".join(reversed(open_brackets))
    start = query[: tokens[-1].end]
    # A comment at the end of a filler takes the closing brackets out.
    return any(_parses(start + filler + closing) for filler in (*_FILLERS, *_second_fillers(closing)))


def _second_fillers(closing: str) -> list[str]:
    """What may have to follow the closing bracket: `sum by (a)` wants its argument, `rate(x{}` its range."""
    if closing.startswith(")"):
        return [f"a{closing[:1]} (x", ") (x", "a) (x", ") x", ") (1,x"]
    if closing.startswith("}"):
        return [f"{matcher}}}[5m]{closing[1:]}#" for matcher in ("", 'a="a"', '="a"', '"a"')]
    return []


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (ValueError, OverflowError):
        return False
    return True


def _at(query: str, place: int, message: str) -> ParseError:
    before = query[:place]
    line = before.count("\n") + 1
    return ParseError(message, line, place - (before.rfind("\n") + 1) + 1)
