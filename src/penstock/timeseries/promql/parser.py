"""Parser of queries.

The underlying parser compiles regular expressions with full Unicode tables while it holds the interpreter
lock: a few hundred characters would block a server for seconds. It also panics on some numbers. Therefore the
text is prepared before it is parsed:

- Each regular expression is replaced by a placeholder, which encodes it. As a regular expression, the
  placeholder matches the empty text if and only if the original does, because the parser refuses selectors
  whose conditions all match it. RE2 decides later whether the original is valid.
- Strings in backticks become strings in double quotes, because the parser interprets escapes in backticks.
- Length, nesting and durations are checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import promql_parser as ast

from penstock.errors import InvalidInput
from penstock.timeseries.matchers import Pattern
from penstock.timeseries.promql.limits import ParseError, UnsupportedQuery

QUERY_CHARACTERS_MAX: Final = 65_536
TOKENS_MAX: Final = 2_000
"""Limit on tokens. The parser needs quadratic time for a chain of operators; this many take a third of a
second."""
NESTING_MAX: Final = 100
"""Limit on nesting. Trees are walked recursively, here and in the parser, so it is checked before parsing."""
_QUICK_CHARACTERS: Final = 100
_DURATION_MAX: Final = timedelta(milliseconds=2**53)
_SECONDS_MAX: Final = 1e13
_MARK: Final = "re"
_EMPTY: Final = "|"
_CLOSING: Final = {"(": ")", "[": "]", "{": "}"}
_TOKEN: Final = re.compile(
    r"""[ \t\r\n]+ | \#[^\n]*
    | (?P<token> "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? | `[^`]*`?
    | [A-Za-z_:][\w:.]* | [0-9.][\w.]* (?:(?<=[eE])[+-][0-9]+)? | =~|!~|==|!=|<=|>= | . )""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class _Token:
    """A piece of a query and its position."""

    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def is_read_at_once(*texts: str) -> bool:
    """Return whether queries or selectors can be parsed on the event loop, within a few milliseconds.

    False for long ones and for those with regular expressions, which may take a tenth of a second each.
    """
    return sum(map(len, texts)) < _QUICK_CHARACTERS and not any("~" in text for text in texts)


def parse(query: str) -> ast.Expr:
    """Return the syntax tree of a query.

    Raises `ParseError` with the parser's message, and `UnsupportedQuery` for a query that the parser would
    misread.
    """
    tokens = _tokens_of(query)
    _check_size(query, tokens)
    _check_durations(tokens)
    try:
        return _parsed(_prepared(query, tokens))
    except (ValueError, OverflowError) as error:
        raise ParseError(str(error)) from None
    except RecursionError:
        raise ParseError("the expression is nested too deeply") from None


def expression_in(placeholder: str) -> str:
    """Return the regular expression that a placeholder in a tree encodes."""
    return bytes.fromhex(placeholder.removeprefix(_MARK).removesuffix(_EMPTY)).decode()


def out_of_range(query: str) -> ParseError:
    """Return the error for a query whose duration or time after `@` does not fit a timestamp."""
    tokens = _tokens_of(query)
    for before, token in zip(["", *(token.text for token in tokens)], tokens, strict=False):
        text = token.text.lstrip(":")
        if text[:1].isdigit() and _overflows(text, after_at=before == "@"):
            what = "time after @" if before == "@" else "duration"
            return ParseError(f"the {what} {text} is out of range")
    return ParseError("a duration or a time is out of range")


def _tokens_of(query: str) -> list[_Token]:
    """Split any text into tokens, without whitespace and comments."""
    found = [match for match in _TOKEN.finditer(query) if match["token"] is not None]
    return [_Token(match["token"], match.start()) for match in found]


def _check_size(query: str, tokens: list[_Token]) -> None:
    if len(query) > QUERY_CHARACTERS_MAX or len(tokens) > TOKENS_MAX:
        raise ParseError(
            f"the query is longer than {QUERY_CHARACTERS_MAX:,} characters or {TOKENS_MAX:,} tokens"
        )
    depth = run = 0
    before = ""
    for token in tokens:
        depth += (token.text in _CLOSING) - (token.text in _CLOSING.values())
        # Consecutive signs also nest.
        run = run + 1 if token.text in "+-" else 0
        if depth > NESTING_MAX or run > NESTING_MAX:
            raise ParseError(f"the expression is nested deeper than {NESTING_MAX}")
        if before == "@" and token.text == "-":
            raise UnsupportedQuery("a time before 1970 after @ is not supported")
        before = token.text


def _check_durations(tokens: list[_Token]) -> None:
    """Raise `ParseError` for numeric durations that would make the parser panic."""
    before, in_brackets = "", False
    for token in tokens:
        in_brackets = token.text == "[" or (in_brackets and token.text != "]")
        text = token.text.lstrip(":")
        if (in_brackets or before == "offset") and _is_too_long(text):
            raise ParseError(f"the duration {text} is out of range")
        before = before if token.text in "+-" else token.text.lower()


def _is_too_long(text: str) -> bool:
    try:
        return not abs(float(text)) < _SECONDS_MAX  # also true for NaN
    except ValueError:
        return False


def _prepared(query: str, tokens: list[_Token]) -> str:
    """Return the text for the parser: `query` with replaced regular expressions and backticks."""
    parts: list[str] = []
    end, before = 0, ""
    for token in tokens:
        literal = token.text
        if before in ("=~", "!~") and literal[:1] in ('"', "'", "`"):
            literal = _placeholder(literal)
        elif literal[:1] == "`":
            literal = _in_double_quotes(literal)
        parts += (query[end : token.start], literal)
        end, before = token.end, token.text
    return "".join(parts)


def _parsed(text: str) -> ast.Expr:
    """Return the parser's tree. Raises `ValueError`, `OverflowError`, `RecursionError`.

    A panic of the parser becomes a `ValueError`, because no `except Exception` would catch it.
    """
    try:
        tree: ast.Expr = ast.parse(text)
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(f"the parser cannot read it: {error}") from None
        raise
    return tree


def _text_of(literal: str) -> str | None:
    """Return the text in a quoted literal, or None if it is not a valid literal."""
    if literal[:1] == "`":
        return literal[1:-1] if literal[1:].endswith("`") else None
    try:
        node = _parsed(f"x{{a={literal}}}")
    except ValueError:
        return None
    assert isinstance(node, ast.VectorSelector)
    return node.matchers.matchers[0].value


def _in_double_quotes(literal: str) -> str:
    """Return a literal in backticks as the same text in double quotes."""
    text = _text_of(literal)
    if text is None:
        return literal
    for character, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(character, escaped)
    return f'"{text}"'


def _placeholder(literal: str) -> str:
    """Return the placeholder for the literal of a regular expression, or an invalid `literal` unchanged."""
    text = _text_of(literal)
    if text is None:
        return literal
    try:
        (is_empty,) = Pattern(text).matches([""])
    except InvalidInput:
        is_empty = False  # creating the matcher raises the error later
    return f'"{_MARK}{text.encode().hex()}{_EMPTY if is_empty else ""}"'


def _overflows(text: str, *, after_at: bool) -> bool:
    try:
        node = _parsed(f"x @ {text}" if after_at else f"x[{text}]")
    except (ValueError, OverflowError):
        return False
    try:
        if isinstance(node, ast.VectorSelector):
            return node.at is None or node.at.at is None
        return isinstance(node, ast.MatrixSelector) and node.range > _DURATION_MAX
    except (ValueError, OverflowError):
        return True
