"""Queries that get no answer, and what they are told."""

from __future__ import annotations

import time

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
    ("query", "place"),
    [
        ("", (1, 1)),
        ("x +", (1, 4)),
        ("x y", (1, 3)),
        ("sum(x", (1, 6)),
        ("x[5m", (1, 5)),
        ('x{a="b"', (1, 8)),
        ("x{a}", (1, 4)),
        ('x{a="b}', (1, 5)),
        ("1 +* 2", (1, 4)),
        ("a\n  + b\n  + * c", (3, 5)),
        ("rate(x[5m]) by (a)", (1, 13)),
        ("x[0s]", (1, 3)),
        ("x[5m:0s]", (1, 6)),
        ("sum(x,", (1, 7)),
        ("x @ start", (1, 10)),
        ("x @ start(", (1, 11)),
        ("group_left", (1, 1)),
        ("x + bool", (1, 9)),
        ("x + group_left y", (1, 5)),
        ('x(a="b")', (1, 4)),
        ("x = y", (1, 3)),
        ("x => y", (1, 3)),
        ("x ! y", (1, 3)),
        ("on(a) x", (1, 1)),
        ("gr\u00fcn", (1, 3)),
        ('x{gr\u00fcn="1"}', (1, 5)),
        ('sum(rate(http{a="b"}[5m]) by (x)', (1, 27)),
        ("x + x @ 1e30", (1, 9)),
        ("x @ 99999999999999999999", (1, 5)),
        ("x[285617y]", (1, 3)),
        ("x[99999999y]", (1, 3)),
        ("x[5m:99999999y]", (1, 6)),
        ("x offset 99999999y", (1, 10)),
        ("x offset -99999999y", (1, 11)),
        ("x[1e18]", (1, 3)),
        ("x[1e30]", (1, 3)),
        ("x[5m:1e400]", (1, 6)),
        ("x\n  OFFSET -1e400", (2, 11)),
        ("x offset NaN", (1, 10)),
        ("x offset Inf", (1, 10)),
        ('x{a=~"("}', (1, 3)),
        ('x{a=~"b"} + x{a!~"a{1001}"}', (1, 15)),
    ],
)
def test_a_parse_error_points_at_what_does_not_fit(query: str, place: tuple[int, int]) -> None:
    with pytest.raises(ParseError) as caught:
        ENGINE.instant(query, 0)
    assert (caught.value.line, caught.value.column) == place
    assert str(caught.value).startswith(f"{place[0]}:{place[1]}: parse error: ")
    assert isinstance(caught.value, InvalidInput)


@pytest.mark.parametrize(
    ("query", "place"),
    [
        ("nosuch(x)", (1, 1)),
        ("(sum(rate(x[5m])) / (nosuch(y)))", (1, 22)),
        ("sum by (job) (nosuch(x)) + 1", (1, 15)),
        ("-nosuch(x)", (1, 2)),
        ("abs()", (1, 1)),
        ('1 + label_replace(x, "a", "b")', (1, 5)),
        ("2 * sum(x, y)", (1, 5)),
        ("topk(x)", (1, 1)),
        ("sum() by (a)", (1, 1)),
        ("{}", (1, 1)),
        ('x + {a=~".*"}', (1, 5)),
        ('x{__name__="y"}', (1, 1)),
        ("rate(x)", (1, 6)),
        ("sum(\n  rate(\n    x\n  )\n)", (3, 5)),
        ("abs((x[5m]))", (1, 5)),
        ("sum by (job) (x[5m])", (1, 15)),
        ("sum(x[5m]) without (job)", (1, 5)),
        ("clamp(x, x, y)", (1, 10)),
        ('clamp(x, 1, "a")', (1, 13)),
        ("quantile_over_time(0.5, x)", (1, 25)),
        ("max_over_time(rate(x)[5m:1m])", (1, 20)),
        ("topk(x, x)", (1, 6)),
        ("x[5m] + 1", (1, 1)),
        ("1 + x[5m]", (1, 5)),
        ("x * on (a) group_left (b) y[5m]", (1, 27)),
        ("x * ignoring (a) group_left y[5m]", (1, 29)),
        ("1 == 2", (1, 3)),
        ("x + (1 > 2)", (1, 8)),
        ("1 + 2 == 3", (1, 7)),
        ("1 == 2 ^ 3 ^ 4", (1, 3)),
        ("x + bool y", (1, 3)),
        ("x + on (a) group_left (a) y", (1, 3)),
        ("x and 1", (1, 1)),
        ("x or y and 1", (1, 6)),
        ("x > y > bool 5 > 1 and 1", (1, 1)),
        ("x + on (a) 1", (1, 1)),
        ("x and on (a) group_left y", (1, 1)),
        ("x - -y[5m]", (1, 5)),
        ("-2 ^ 'a'", (1, 6)),
        ("sum(x)[5m]", (1, 7)),
        ("1[5m:]", (1, 1)),
        ("y + x offset 5m offset -5m", (1, 5)),
        ("x @ 1 @ end()", (1, 1)),
        ("sum(x) offset 5m", (1, 1)),
        ("(x) @ 5", (1, 1)),
        ("x # nosuch(\n + nosuch(y)", (2, 4)),
        ("+".join(["1"] * 100) + " + nosuch(x)", (1, 203)),
    ],
)
def test_an_error_of_meaning_points_at_the_part_that_prometheus_names(
    query: str, place: tuple[int, int]
) -> None:
    with pytest.raises(ParseError) as caught:
        ENGINE.instant(query, 0)
    assert (caught.value.line, caught.value.column) == place


@pytest.mark.parametrize("text", ["nosuch(x)", "x ^ " * 900 + "nosuch(x)", "1 + " * 990 + "nosuch(x)"])
def test_the_part_that_is_wrong_is_looked_for_within_a_bound(text: str) -> None:
    began = time.monotonic()
    with pytest.raises(ParseError, match="nosuch"):
        ENGINE.instant(text, 0)
    assert time.monotonic() - began < 30


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


def test_a_query_may_hold_so_many_samples_only() -> None:
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


async def test_a_query_may_take_so_long_only() -> None:
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
