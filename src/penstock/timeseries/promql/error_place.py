"""Where the text of a query is wrong.

The parser says what is wrong but not where. Wrong grammar stands at the first token after which no
continuation can be parsed. Continuations are tried from a short list, at a number of tokens that is found
by halves: what can be continued can be continued from every shorter text too. A wrong meaning, such as a
function that does not exist, is told of the smallest part that the parser refuses for the same reason,
at the place that Prometheus names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

import promql_parser as ast

from penstock.errors import InvalidInput
from penstock.timeseries.matchers import Pattern
from penstock.timeseries.promql.parser import (
    CLOSING,
    Part,
    in_plain_quotes,
    outline,
    parsed,
    text_of,
    word_for,
)

__all__ = [
    "Token",
    "place_of_error",
    "place_of_expression",
    "text_to_parse",
    "tokens_of",
    "without_expressions",
]

_WORK_MAX: Final = 10_000_000
"""Squares of the lengths of all attempts, which is the time they take: some tenths of a second in all.

Then the best place so far stands: what is before it is right."""

_TOKEN: Final = re.compile(
    r"""[ \t\r\n]+ | \#[^\n]*
    | (?P<token> "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? | `[^`]*`?
    | [A-Za-z_:][\w:.]* | [0-9.][\w.]* (?:(?<=[eE])[+-][0-9]+)? | =~|!~|==|!=|<=|>= | . )""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_AT_MARK: Final = re.compile("comparisons between|bool modifier|label .* must not occur|ranges only allowed")
_AT_START: Final = re.compile(
    r"unknown function|expected (at \w+ )?\d+ argument|no arguments|wrong number|set operator|vector matching"
    r"|no grouping|unary expression|.* may not be set|.* must be preceded|metric name must"
    r"|vector selector must|subquery is only"
)
_WRONG_OPERAND: Final = "binary expression must contain"
_WRONG_ARGUMENT: Final = re.compile(r"expected type (\w+) in .*, got (\w+)")
_SAMPLES: Final = {"scalar": "1", "vector": "x", "matrix": "x[1m]", "string": '"a"'}
"""Something of each kind."""
_BETWEEN_TOKENS: Final = re.compile(r"[\w:]{2}|[=!<>][=~]", re.ASCII)
_FILLERS: Final = (
    "", "()", " x", "x[5m]", " 1", "[5m]", "5m", '="a"', '"a"', 'a="a"', ' "a"', ",x", ",1,x", ":1m",
    "() x", "(x)", "(x[5m])", " (a) (x)", "(x,1)", "(1,x)", "(1,x[5m])", ",1", ",1,1", ',"a"', ',"a","a"',
    ',"a","a","a"', ',"a","a","a","a"', "start()", 'x,"a","a","a","a"', "1,x", "1,x[5m]", '"a",x',
    '"a","a"', '"a","a","a"', '"a","a","a","a"', "1,1", "x,1",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of a query, and where it starts."""

    text: str
    at: int
    read: str
    """What the parser is given for it."""

    @property
    def end(self) -> int:
        return self.at + len(self.text)


def tokens_of(query: str) -> list[Token]:
    """The pieces of a text, without spaces and comments. Any text has some."""
    found = [match for match in _TOKEN.finditer(query) if match["token"] is not None]
    return [Token(match["token"], match.start(), match["token"]) for match in found]


def without_expressions(tokens: list[Token]) -> list[Token]:
    """The same, but for what is read of regular expressions and of texts in backticks."""
    made, before = [], ""
    for token in tokens:
        quote = token.text[:1]
        if before in ("=~", "!~") and quote in "\"'`":
            token = replace(token, read=word_for(token.text))
        elif quote == "`":
            token = replace(token, read=in_plain_quotes(token.text))
        made.append(token)
        before = token.text
    return made


def text_to_parse(query: str, tokens: list[Token]) -> str:
    """The whole query as the parser is given it."""
    return "".join(_pieces(query, tokens))


def place_of_error(query: str, tokens: list[Token], message: str) -> int:
    """The place of what is wrong, or the end of a text that is not finished."""
    if not tokens:
        return 0
    if not _is_of_meaning(message):
        return _Search(query, tokens, grammar_only=True).place()
    place = _Meaning(query, tokens, message).place()
    return _Search(query, tokens, grammar_only=False).place() if place is None else place


def place_of_expression(tokens: list[Token]) -> int | None:
    """Where the matcher stands whose regular expression is none."""
    for label, operator, literal in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if operator.text in ("=~", "!~") and not _is_expression(literal.text):
            return label.at
    return None


def _is_expression(literal: str) -> bool:
    text = text_of(literal)
    try:
        return text is not None and bool(Pattern(text))
    except InvalidInput:
        return False


def _is_of_meaning(message: str) -> bool:
    """Whether the grammar is right: the parser looks at what a text means when it has read all of it."""
    kinds = (_AT_MARK, _AT_START, _WRONG_ARGUMENT)
    return message.startswith(_WRONG_OPERAND) or any(kind.match(message) for kind in kinds)


class _Meaning:
    """The smallest part of a query that is refused for the same reason as the whole."""

    def __init__(self, query: str, tokens: list[Token], message: str) -> None:
        self._tokens = tokens
        self._message = message
        self._pieces = _pieces(query, tokens)

    def place(self) -> int | None:
        """None if the part is not found within the bound of work."""
        part = self._part()
        if part is None:
            return None
        if _AT_MARK.match(self._message):
            return self._tokens[part.mark].at
        if found := _WRONG_ARGUMENT.match(self._message):
            part = self._wrong_argument(part, *found.groups())
        elif self._message.startswith(_WRONG_OPERAND):
            part = next((one for one in part.parts if self._kind(one) not in ("scalar", "vector")), part)
        return self._tokens[part.first].at

    def _part(self) -> Part | None:
        work_left = _WORK_MAX
        for part in outline([token.text for token in self._tokens]):
            work_left -= (part.end - part.first) ** 2
            if work_left < 0:
                return None
            if _complaint(self._text(part.first, part.end)) == self._message:
                return part
        return None

    def _wrong_argument(self, call: Part, expected: str, got: str) -> Part:
        """The first argument of the kind that was got, and that is not rightly of that kind."""
        candidates = [one for one in call.parts if self._kind(one) == got]
        for one in candidates:
            before, behind = self._text(call.first, one.first), self._text(one.end, call.end)
            told = _complaint(f"{before} {_SAMPLES.get(expected, '')} {behind}")
            if told is None or told == self._message or not told.endswith(f"got {expected}"):
                return one
        return candidates[0] if candidates else call

    def _kind(self, part: Part) -> str:
        try:
            return _kind_of(parsed(self._text(part.first, part.end)))
        except (ValueError, OverflowError, RecursionError):
            return ""

    def _text(self, first: int, end: int) -> str:
        return "".join(self._pieces[first:end])


def _kind_of(node: ast.Expr) -> str:
    """What an expression is worth, in the parser's words."""
    while isinstance(node, ast.ParenExpr | ast.UnaryExpr):
        node = node.expr
    if isinstance(node, ast.Call):
        return str(node.func.return_type).removeprefix("ValueType.").lower()
    if isinstance(node, ast.BinaryExpr):
        kinds = {_kind_of(node.lhs), _kind_of(node.rhs)}
        return "scalar" if kinds == {"scalar"} else "vector"
    if isinstance(node, ast.NumberLiteral):
        return "scalar"
    if isinstance(node, ast.StringLiteral):
        return "string"
    return "matrix" if isinstance(node, ast.MatrixSelector | ast.SubqueryExpr) else "vector"


class _Search:
    """The longest start of a query that can be continued, to a query or, by its grammar only, to a text."""

    def __init__(self, query: str, tokens: list[Token], *, grammar_only: bool) -> None:
        self._grammar_only = grammar_only
        self._query = query
        self._tokens = tokens
        self._starts = _pieces(query, tokens)
        self._work_left = _WORK_MAX

    def place(self) -> int:
        low, high = 0, len(self._tokens)
        while low < high and self._work_left > 0:
            middle = (low + high + 1) // 2
            if self._can_go_on(middle):
                low = middle
            else:
                high = middle - 1
        if low == len(self._tokens):
            return self._tokens[-1].end
        wrong = self._tokens[low]
        return wrong.at + (wrong.text[:1] == ":" and wrong.text[1:2].isdigit())  # the step of a subquery

    def _can_go_on(self, count: int) -> bool:
        start, closing = "".join(self._starts[:count]), self._closing(count)
        # A comment at the end of a filler takes the closing brackets out.
        for filler in (*_FILLERS, *_second_fillers(closing)):
            self._work_left -= count * count
            if self._work_left > 0 and self._is_right(_joined(start, filler) + closing):
                return True
        return False

    def _is_right(self, text: str) -> bool:
        told = _complaint(text)
        return told is None or (self._grammar_only and _is_of_meaning(told))

    def _closing(self, count: int) -> str:
        """The brackets that are still open, closed."""
        waiting: list[str] = []
        for token in self._tokens[:count]:
            if token.text in CLOSING:
                waiting.append(CLOSING[token.text])
            elif waiting and token.text == waiting[-1]:
                waiting.pop()
        return "".join(reversed(waiting))


def _joined(start: str, filler: str) -> str:
    """Both, apart where they would become one token."""
    return f"{start} {filler}" if _BETWEEN_TOKENS.fullmatch(start[-1:] + filler[:1]) else start + filler


def _pieces(query: str, tokens: list[Token]) -> list[str]:
    """What is read of each token, with what stands before it."""
    ends = [0, *(token.end for token in tokens)]
    return [query[end : token.at] + token.read for end, token in zip(ends, tokens, strict=False)]


def _second_fillers(closing: str) -> list[str]:
    """What may have to follow the closing bracket: `sum by (a)` wants its argument, `rate(x{}` its range."""
    if closing.startswith(")"):
        return [f"a{closing[:1]} (x", ") (x", "a) (x", ") x", ") (1,x"]
    if closing.startswith("}"):
        return [f"{matcher}}}[5m]{closing[1:]}#" for matcher in ("", 'a="a"', '="a"', '"a"')]
    return []


def _complaint(text: str) -> str | None:
    """What the parser says against it."""
    try:
        parsed(text)
    except (ValueError, OverflowError, RecursionError) as error:
        return str(error)
    return None
