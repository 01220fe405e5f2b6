"""Refused queries and their errors."""

from __future__ import annotations

import pytest
from tests.unit.timeseries.promql_doubles import ENGINE, load

from penstock.errors import ConfigError, InvalidInput, LimitExceeded
from penstock.testing.clock import ManualClock
from penstock.timeseries.promql import (
    BadRange,
    Engine,
    EngineConfig,
    ParseError,
    QueryTimeout,
    StaticSource,
    TooManySamples,
    UnsupportedQuery,
    parse_selector,
)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "no expression found"),
        ("x +", "invalid promql query"),
        ("x y", "invalid promql query"),
        ("sum(x", "unclosed left parenthesis"),
        ("x[5m", "inside brackets"),
        ('x{a="b"', "inside braces"),
        ("x{a}", "label matching operator after 'a'"),
        ('x{a="b}', "unterminated quoted string"),
        ("x[0s]", "duration must be greater than 0"),
        ("x ! y", "unexpected character after '!'"),
        ("gr\u00fcn", "unexpected character: '\u00fc'"),
        ("nosuch(x)", "'nosuch'"),
        ("abs()", r"expected 1 argument\(s\) in call to 'abs', got 0"),
        ("rate(x)", "expected type matrix in call to function 'rate', got vector"),
        ("x[5m] + 1", "binary expression must contain"),
        ("1 == 2", "must use BOOL modifier"),
        ("x and 1", "'and' not allowed"),
        ("x @ 1 @ end()", "may not be set multiple times"),
        ("{}", "at least one non-empty matcher"),
        ("x + x @ 1e30", "the time after @ 1e30 is out of range"),
        ("x @ 99999999999999999999", "the time after @ 99999999999999999999 is out of range"),
        ("x[285617y]", "the duration 285617y is out of range"),
        ("x[5m:99999999y]", "the duration 99999999y is out of range"),
        ("x offset -99999999y", "the duration 99999999y is out of range"),
        ("x[1e18]", "the duration 1e18 is out of range"),
        ("x[5m:1e400]", "the duration 1e400 is out of range"),
        ("x\n  OFFSET -1e400", "the duration 1e400 is out of range"),
        ("x offset NaN", "the duration NaN is out of range"),
        ("x offset Inf", "the duration Inf is out of range"),
        ('x{a=~"("}', r"'\(' is not a regular expression"),
        ('x{a=~"b"} + x{a!~"a{1001}"}', r"'a\{1001\}' is not a regular expression"),
    ],
)
def test_a_parse_error_says_what_the_parser_says(query: str, message: str) -> None:
    with pytest.raises(ParseError, match=message) as caught:
        ENGINE.instant(query, 0)
    assert str(caught.value).startswith("parse error: ")
    assert isinstance(caught.value, InvalidInput)


@pytest.mark.parametrize(
    "query",
    ["(" * 101 + "x" + ")" * 101, "-" * 101 + "x", "1+" * 3000 + "1", "x or " * 300 + "x", "x" * 70_000],
)
def test_a_query_that_is_too_deep_or_too_long_is_refused_before_it_can_hurt(query: str) -> None:
    with pytest.raises(ParseError, match=r"nested|longer"):
        ENGINE.instant(query, 0)


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("histogram_fraction(0, 1, x)", "histogram_fraction"),
        ("sum(holt_winters_like + info(x))", "info"),
        ("limitk(2, x)", "limitk"),
        ('x{a="1" or b="2"}', "or"),
        ("a + fill(0) b", "fill"),
        ("x @ -5", "@"),
    ],
)
def test_what_is_not_supported_is_named(query: str, name: str) -> None:
    with pytest.raises(UnsupportedQuery, match=name):
        ENGINE.instant(query, 0)


@pytest.mark.parametrize(
    ("start", "end", "step"), [(10, 5, 1), (0, 10, 0), (0, 10, -1), (0, 11_001, 1), (0, 2**60, 2**50)]
)
def test_steps_that_cannot_be_are_refused(start: int, end: int, step: int) -> None:
    with pytest.raises(BadRange):
        ENGINE.range("x", start, end, step)


def test_eleven_thousand_steps_are_allowed_from_the_first_point_on() -> None:
    assert ENGINE.range("x", 0, 11_000, 1).selections


@pytest.mark.parametrize("query", ["x[5m]", "x[5m:1m]", '"text"'])
def test_a_range_query_has_to_be_a_vector_or_a_number(query: str) -> None:
    with pytest.raises(ParseError, match="scalar or an instant vector"):
        ENGINE.range(query, 0, 1, 1)


def test_a_query_may_hold_a_limited_number_of_samples() -> None:
    source = load({"x": "0+1x100"})
    with pytest.raises(TooManySamples):
        Engine(EngineConfig(samples_max=50)).instant("sum_over_time(x[2h])", 6_000_000).evaluate(source)
    with pytest.raises(TooManySamples):
        Engine(EngineConfig(samples_max=1000)).instant("sum_over_time(x[2h:1s])", 6_000_000)
    assert issubclass(TooManySamples, LimitExceeded)


def test_counting_values_is_paid_for_by_the_values_before_there_is_room_for_them() -> None:
    source = load({f'x{{n="{n}"}}': f"{n}+0.37x99" for n in range(5)})
    engine = Engine(EngineConfig(samples_max=20_000))
    with pytest.raises(TooManySamples):
        engine.range('count_values("v", x)', 0, 99 * 60_000, 60_000).evaluate(source)
    assert engine.range("count(x)", 0, 99 * 60_000, 60_000).evaluate(source).series


async def test_a_query_may_take_a_limited_time() -> None:
    clock = ManualClock()
    source = load({"x": "1"})
    prepared = Engine(EngineConfig(timeout="2s"), clock=clock).instant("x", 0)
    await clock.advance(1.9)
    assert prepared.evaluate(source).series
    await clock.advance(0.2)
    with pytest.raises(QueryTimeout, match="2s"):
        prepared.evaluate(source)


async def test_a_caller_may_shorten_the_time_but_not_lengthen_it() -> None:
    clock = ManualClock()
    source = load({"x": "1"})
    engine = Engine(EngineConfig(timeout="2s"), clock=clock)
    short, long = engine.instant("x", 0, timeout_s=1), engine.instant("x", 0, timeout_s=60)
    await clock.advance(1.5)
    with pytest.raises(QueryTimeout):
        short.evaluate(source)
    await clock.advance(1)
    with pytest.raises(QueryTimeout):
        long.evaluate(source)


@pytest.mark.parametrize("text", ["sum(x)", "x[5m]", "1", "(x)"])
def test_a_selector_is_nothing_but_a_selector(text: str) -> None:
    with pytest.raises(ParseError):
        parse_selector(text)


@pytest.mark.parametrize("wrong", [{"lookback": 0}, {"samples_max": 0}, {"steps_max": 0}, {"timeout": "0s"}])
def test_limits_have_to_make_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**wrong)  # type: ignore[arg-type]


def test_a_hostile_expression_takes_linear_time() -> None:
    source: StaticSource = load({f'x{{a="{"a" * 5000}"}}': "1"})
    assert ENGINE.instant('x{a=~"(a+)+b"}', 0).evaluate(source).series == []


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("1 - 2 - 3", -4),
        ("2 + 3 * 4 ^ 2", 50),
        ("-2 ^ 2", -4),
        ("8 / 4 * 2", 4),
        ("7 % 4 % 2", 1),
        ("1 > bool 0 + 1", 0),
    ],
)
def test_operators_bind_as_documented(query: str, value: float) -> None:
    (series,) = ENGINE.instant(query, 0).evaluate(load({})).series
    assert series.values.tolist() == [value]


def test_a_time_that_no_clock_shows_is_refused() -> None:
    with pytest.raises(InvalidInput, match="out of range"):
        ENGINE.instant("x @ 1e20", 0)


@pytest.mark.parametrize("text", ["up offset 99999999y", "up offset 1e400", "up @ 1e30", 'up{a=~"a{1001}"}'])
def test_a_selector_with_a_time_or_an_expression_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse_selector(text)


def test_a_panic_of_the_parser_is_an_error_of_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panics(text: str) -> None:
        raise PanicException("value is too big")

    monkeypatch.setattr("promql_parser.parse", panics)
    with pytest.raises(ParseError, match="value is too big"):
        ENGINE.instant("x", 0)
