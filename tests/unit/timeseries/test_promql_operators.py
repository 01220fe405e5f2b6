"""Operators between vectors, and aggregations over them."""

from __future__ import annotations

import math

import pytest
from tests.unit.timeseries.promql_doubles import at, load, number_at, over

from penstock.timeseries.promql import ExecutionError, StaticSource


@pytest.fixture
def rates() -> StaticSource:
    """Return the example from Prometheus' documentation on vector matching."""
    return load(
        {
            'method_code:http_errors:rate5m{method="get", code="500"}': "24",
            'method_code:http_errors:rate5m{method="get", code="404"}': "30",
            'method_code:http_errors:rate5m{method="put", code="501"}': "3",
            'method_code:http_errors:rate5m{method="post", code="500"}': "6",
            'method_code:http_errors:rate5m{method="post", code="404"}': "21",
            'method:http_requests:rate5m{method="get"}': "600",
            'method:http_requests:rate5m{method="del"}': "34",
            'method:http_requests:rate5m{method="post"}': "120",
        }
    )


def test_one_to_one_as_documented(rates: StaticSource) -> None:
    query = 'method_code:http_errors:rate5m{code="500"} / ignoring(code) method:http_requests:rate5m'
    assert at(rates, query, 0) == pytest.approx({'{method="get"}': 0.04, '{method="post"}': 0.05})


def test_many_to_one_as_documented(rates: StaticSource) -> None:
    query = "method_code:http_errors:rate5m / ignoring(code) group_left method:http_requests:rate5m"
    assert at(rates, query, 0) == pytest.approx(
        {
            '{code="500", method="get"}': 0.04,
            '{code="404", method="get"}': 0.05,
            '{code="500", method="post"}': 0.05,
            '{code="404", method="post"}': 0.175,
        }
    )


def test_one_to_many_keeps_the_sides_of_the_operator(rates: StaticSource) -> None:
    query = "method:http_requests:rate5m / on(method) group_right method_code:http_errors:rate5m"
    assert at(rates, query, 0)['{code="500", method="get"}'] == 25


def test_many_to_one_matching_must_be_explicit(rates: StaticSource) -> None:
    with pytest.raises(ExecutionError, match="many-to-one matching must be explicit"):
        at(rates, "method_code:http_errors:rate5m / on(method) method:http_requests:rate5m", 0)


def test_two_matches_on_the_one_side_are_refused_with_both_named(rates: StaticSource) -> None:
    query = "method:http_requests:rate5m / on(method) method_code:http_errors:rate5m"
    with pytest.raises(ExecutionError, match=r"duplicate series .* right .*code=.*code="):
        at(rates, query, 0)


def test_a_filter_that_drops_the_second_match_leaves_one(rates: StaticSource) -> None:
    query = 'method_code:http_errors:rate5m{method="get"} > on(method) (method:http_requests:rate5m / 24)'
    assert at(rates, query, 0) == {'{method="get"}': 30}


def test_group_left_brings_labels_of_the_one_side() -> None:
    source = load({'m{i="1"}': "2", 'm{i="2"}': "3", 'info{version="7"}': "1"})
    query = "m * on() group_left(version) info"
    assert at(source, query, 0) == {'{i="1", version="7"}': 2, '{i="2", version="7"}': 3}


def test_group_labels_that_make_two_results_one_are_refused() -> None:
    source = load({'m{i="1"}': "2", 'm{i="2"}': "3", 'info{i="7"}': "1"})
    with pytest.raises(ExecutionError, match="grouping labels must ensure unique matches"):
        at(source, "m * on() group_left(i) info", 0)


def test_a_series_that_replaces_another_is_matched_step_by_step() -> None:
    source = load({"m": "1 2 3 4", 'info{v="1"}': "1 1 stale", 'info{v="2"}': "_ _ 1 1"})
    found = over(source, "m * on() group_left(v) info", 0, 3)
    assert found['{v="1"}'][:2] == [1, 2]
    assert found['{v="2"}'][2:] == [3, 4]


def test_comparisons_filter_and_keep_the_name(rates: StaticSource) -> None:
    kept = at(rates, "method:http_requests:rate5m > 100", 0)
    assert list(kept.values()) == [600, 120]
    assert all(labels.startswith("method:http_requests:rate5m{") for labels in kept)
    assert list(at(rates, "100 < method:http_requests:rate5m", 0).values()) == [600, 120]


def test_bool_gives_one_and_zero_without_the_name(rates: StaticSource) -> None:
    found = at(rates, "method:http_requests:rate5m > bool 100", 0)
    assert found == {'{method="del"}': 0, '{method="get"}': 1, '{method="post"}': 1}


def test_sets_keep_or_leave_whole_series(rates: StaticSource) -> None:
    left = "method_code:http_errors:rate5m"
    assert len(at(rates, f"{left} and on(method) method:http_requests:rate5m", 0)) == 4
    assert list(at(rates, f"{left} unless on(method) method:http_requests:rate5m", 0).values()) == [3]
    joined = at(rates, f"method:http_requests:rate5m or on(method) {left}", 0)
    assert sorted(joined.values()) == [3, 34, 120, 600]


@pytest.fixture
def numbers() -> StaticSource:
    return load(
        {
            'n{g="a", i="1"}': "1",
            'n{g="a", i="2"}': "4",
            'n{g="b", i="3"}': "10",
            'n{g="b", i="4"}': "NaN",
            'n{i="5"}': "7",
        }
    )


@pytest.mark.parametrize(
    ("op", "values"),
    [
        ("sum", (5, math.nan, 7)),
        ("avg", (2.5, math.nan, 7)),
        ("min", (1, 10, 7)),
        ("max", (4, 10, 7)),
        ("count", (2, 2, 1)),
        ("group", (1, 1, 1)),
        ("stdvar", (2.25, math.nan, 0)),
        ("stddev", (1.5, math.nan, 0)),
    ],
)
def test_aggregations_per_group(numbers: StaticSource, op: str, values: tuple[float, ...]) -> None:
    found = at(numbers, f"{op} by (g) (n)", 0)
    expected = dict(zip(('{g="a"}', '{g="b"}', "{}"), values, strict=True))
    assert found == pytest.approx(expected, nan_ok=True)
    assert at(numbers, f"{op} without (i) (n)", 0) == pytest.approx(expected, nan_ok=True)


def test_a_sum_keeps_what_rounding_would_lose() -> None:
    source = load({'v{i="1"}': "1e100", 'v{i="2"}': "1", 'v{i="3"}': "-1e100"})
    assert number_at(source, "sum(v)", 0) == 1


def test_aggregating_nothing_is_nothing(numbers: StaticSource) -> None:
    for query in ("sum(missing)", "topk(2, missing)", "quantile(0.5, missing)", 'count_values("v", missing)'):
        assert at(numbers, query, 0) == {}


def test_quantiles_lie_between_neighbours(numbers: StaticSource) -> None:
    assert at(numbers, "quantile by (g) (0.75, n)", 0)['{g="a"}'] == pytest.approx(3.25)
    assert number_at(numbers, "quantile(2, n)", 0) == math.inf


def test_topk_keeps_series_as_they_are_and_nan_last(numbers: StaticSource) -> None:
    assert list(at(numbers, "topk(2, n)", 0).values()) == [10, 7]
    assert list(at(numbers, "bottomk(2, n)", 0).values()) == [1, 4]
    assert math.isnan(list(at(numbers, "topk(9, n)", 0).values())[-1])
    assert math.isnan(list(at(numbers, "bottomk(9, n)", 0).values())[-1])
    assert at(numbers, "topk(0, n)", 0) == {}
    assert list(at(numbers, "topk by (g) (1, n)", 0).values()) == [4, 10, 7]


@pytest.mark.parametrize("number", ["NaN", "+Inf", "-Inf", "1e30", "9223372036854775808"])
def test_topk_of_an_invalid_count_is_refused(numbers: StaticSource, number: str) -> None:
    for function in ("topk", "bottomk"):
        with pytest.raises(ExecutionError, match="number of series"):
            at(numbers, f"{function}({number}, n)", 0)


def test_topk_of_more_series_than_there_are_takes_all(numbers: StaticSource) -> None:
    assert len(at(numbers, "topk(9e18, n)", 0)) == len(at(numbers, "n", 0))


def test_topk_chooses_again_at_every_step() -> None:
    source = load({'v{i="1"}': "1 5", 'v{i="2"}': "2 2"})
    found = over(source, "topk(1, v)", 0, 1)
    assert found['v{i="2"}'][0] == 2
    assert found['v{i="1"}'][1] == 5


def test_values_are_counted_by_their_text() -> None:
    source = load({'v{i="1"}': "1.5", 'v{i="2"}': "1.5", 'v{i="3"}': "1e+21", 'v{i="4"}': "NaN"})
    assert at(source, 'count_values("value", v)', 0) == {
        '{value="1.5"}': 2,
        '{value="1000000000000000000000"}': 1,
        '{value="NaN"}': 1,
    }


def test_minus_zero_is_counted_apart_from_zero_and_every_nan_as_one() -> None:
    source = load({'v{i="1"}': "0", 'v{i="2"}': "-0", 'v{i="3"}': "NaN", 'v{i="4"}': "0", 'v{i="5"}': "NaN"})
    assert at(source, 'count_values("value", -v * -1)', 0) == {
        '{value="0"}': 2,
        '{value="-0"}': 1,
        '{value="NaN"}': 2,
    }


def test_a_label_for_values_needs_a_name(numbers: StaticSource) -> None:
    with pytest.raises(ExecutionError, match="count_values"):
        at(numbers, 'count_values("", n)', 0)


def test_nothing_is_refused_at_a_step_where_nothing_can_match() -> None:
    source = load({'one{i="1"}': "1 1", 'one{i="2"}': "1 stale", "many": "_ 5"})
    assert over(source, "many * on() one", 0, 1)["{}"][1] == 5
