"""Regular expressions of queries: the placeholders that the parser sees, and the final matchers."""

from __future__ import annotations

import promql_parser
import pytest

from penstock.timeseries.matchers import MatchOp
from penstock.timeseries.promql.engine import parse_selector
from penstock.timeseries.promql.limits import ParseError
from penstock.timeseries.promql.parser import parse

SLOW = r"(\\w{200})"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the texts that the parser receives."""
    texts: list[str] = []
    parse_text = promql_parser.parse

    def watched(text: str) -> object:
        texts.append(text)
        return parse_text(text)

    monkeypatch.setattr(promql_parser, "parse", watched)
    return texts


@pytest.mark.parametrize(
    "query",
    [
        f'x{{a=~"{SLOW}", b!~"{SLOW}"}}',
        f"x{{a=~'{SLOW}'}} + y{{a !~ `{SLOW}`}}",
        f'rate(x{{a=~"{SLOW}"}})',
        f'nosuch(x{{a=~"{SLOW}"}})',
        f'x{{a=~"{SLOW}"}} + {{a=~".*"}}',
        f'x{{a=~"{SLOW}"',
        f'x{{a=~"{SLOW}"}} }}',
        f'x{{a=~"{SLOW}" "b"}}',
        f'{{"a"=~"{SLOW}"}} or',
    ],
)
def test_the_parser_is_never_given_a_regular_expression(query: str, seen: list[str]) -> None:
    try:
        parse(query)
    except ParseError:
        pass
    assert seen
    for text in seen:
        behind_matches = text.replace(" ", "").replace("!~", "=~").split("=~")[1:]
        assert not any("w{200}" in rest[:20] for rest in behind_matches), text


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        (r'"a.*|b"', "a.*|b"),
        (r'"\\d+\\.x"', r"\d+\.x"),
        ("'it\\'s'", "it's"),
        (r"`\d\n`", r"\d\n"),
        ('"grün|日本"', "grün|日本"),
        (r'"\u00e9\x41"', "éA"),
        ('"b|"', "b|"),
        ('""', ""),
        ('"re61|"', "re61|"),
    ],
)
@pytest.mark.parametrize(("sign", "op"), [("=~", MatchOp.REGEX), ("!~", MatchOp.NOT_REGEX)])
def test_an_expression_comes_through_as_it_was_written(
    text: str, expression: str, sign: str, op: MatchOp
) -> None:
    (_, matcher) = parse_selector(f"x{{a{sign}{text}}}")
    assert (matcher.op, matcher.name, matcher.value) == (op, "a", expression)


@pytest.mark.parametrize("condition", ['a=~".*"', 'a=~"b|"', 'a=~""', 'a!~"b"', 'a=~"(?:b)?", c!~".+"'])
def test_a_selector_of_expressions_that_all_match_nothing_is_refused(condition: str) -> None:
    with pytest.raises(ParseError, match="at least one non-empty matcher"):
        parse(f"{{{condition}}}")


@pytest.mark.parametrize("condition", ['a=~".+"', 'a!~".*"', 'a=~"b|c"', 'a=~".*", c!~"b|"'])
def test_a_selector_of_an_expression_that_needs_something_is_allowed(condition: str) -> None:
    parse(f"{{{condition}}}")


def test_nothing_is_escaped_in_backticks() -> None:
    (_, matcher) = parse_selector("x{a=`\\d\\n \"'\n`}")
    assert matcher.value == "\\d\\n \"'\n"
