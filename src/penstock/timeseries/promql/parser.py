"""The parser, and what is kept away from it.

It compiles regular expressions with the tables of all of Unicode, and holds the interpreter meanwhile: some
hundred characters would stop a server for seconds. So it is never given those of a query. RE2 has the verdict
on them, and in the text that is parsed a word stands for each, which holds it, and which matches the empty
text if the expression does: a selector needs a condition that does not.
"""

from __future__ import annotations

from typing import Final

import promql_parser as ast

from penstock.errors import InvalidInput
from penstock.timeseries.patterns import Pattern

__all__ = ["expression_in", "in_plain_quotes", "parsed", "text_of", "word_for"]

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
