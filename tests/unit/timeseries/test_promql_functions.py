"""Functions, as documented by Prometheus."""

from __future__ import annotations

import math

import pytest
from tests.unit.timeseries.promql_doubles import at, load, number_at, over

from penstock.timeseries.promql import ExecutionError, StaticSource

HOUR = 60


@pytest.fixture
def source() -> StaticSource:
    return load(
        {
            "steady_total": "0+60x60",
            "reset_total": "0+10x4 0+10x5",
            "gauge": "3 1 4 1 5 9 2 6",
            "odd": "1 NaN 3",
            "nothing": "NaN NaN",
            "huge": "1e100 1 -1e100",
            "negative": "-2.5",
        }
    )


def test_the_rate_of_a_steady_counter_is_its_slope(source: StaticSource) -> None:
    assert number_at(source, "rate(steady_total[5m])", 30) == pytest.approx(1)


def test_an_increase_is_extended_to_the_edges_of_its_window(source: StaticSource) -> None:
    # Samples at 26 to 30 minutes differ by 240; the window of 5 minutes is 5/4 of their distance.
    assert number_at(source, "increase(steady_total[5m])", 30) == pytest.approx(300)


def test_an_increase_is_not_extended_below_zero() -> None:
    # 10 more in a minute: the counter was zero six seconds before its first sample.
    source = load({"young_total": "1 11"}, start_ms=120_000)
    assert number_at(source, "increase(young_total[10m])", 3) == pytest.approx(10 * 66 / 60)


def test_an_increase_is_extended_by_half_a_distance_where_samples_are_missing() -> None:
    source = load({"late_total": "1000 1010 1020"}, start_ms=300_000)
    # From 5 to 7 minutes; the window of (0, 10] starts and ends more than 66 seconds away.
    assert number_at(source, "increase(late_total[10m])", 10) == pytest.approx(20 * (120 + 30 + 30) / 120)


def test_a_reset_is_added_back(source: StaticSource) -> None:
    # 30 40 0 10: the increase is 10 + 0 + 10, and samples fill the window except for its first minute.
    assert number_at(source, "increase(reset_total[4m])", 6) == pytest.approx(20 * 240 / 180)


def test_delta_takes_a_fall_as_a_fall(source: StaticSource) -> None:
    assert number_at(source, "delta(reset_total[4m])", 6) == pytest.approx(-20 * 240 / 180)


@pytest.mark.parametrize("function", ["rate", "increase", "delta", "irate", "idelta", "deriv"])
def test_one_sample_shows_no_change(source: StaticSource, function: str) -> None:
    assert at(source, f"{function}(steady_total[1m])", 30) == {}


def test_irate_looks_at_the_last_two_samples_only(source: StaticSource) -> None:
    assert number_at(source, "irate(reset_total[5m])", 4) == pytest.approx(10 / 60)
    assert number_at(source, "irate(reset_total[5m])", 5) == 0
    assert number_at(source, "idelta(reset_total[5m])", 5) == -40


def test_resets_and_changes_are_counted(source: StaticSource) -> None:
    assert number_at(source, "resets(reset_total[10m])", 9) == 1
    assert number_at(source, "changes(gauge[10m])", 7) == 7
    assert number_at(source, "changes(nothing[10m])", 7) == 0


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("sum_over_time(gauge[10m])", 31),
        ("avg_over_time(gauge[10m])", 31 / 8),
        ("min_over_time(gauge[10m])", 1),
        ("max_over_time(gauge[10m])", 9),
        ("count_over_time(gauge[10m])", 8),
        ("last_over_time(gauge[10m])", 6),
        ("first_over_time(gauge[10m])", 3),
        ("present_over_time(gauge[10m])", 1),
        ("quantile_over_time(0.5, gauge[10m])", 3.5),
        ("quantile_over_time(-1, gauge[10m])", -math.inf),
        ("quantile_over_time(2, gauge[10m])", math.inf),
        ("stdvar_over_time(gauge[10m])", 6.609375),
        ("stddev_over_time(gauge[10m])", math.sqrt(6.609375)),
        ("mad_over_time(gauge[10m])", 2.0),
        ("min_over_time(odd[10m])", 1),
        ("max_over_time(odd[10m])", 3),
        ("sum_over_time(huge[10m])", 1),
        ("deriv(steady_total[5m])", 1),
        ("predict_linear(steady_total[5m], 60)", 480),
    ],
)
def test_a_range_folds_into_one_value(source: StaticSource, query: str, value: float) -> None:
    assert number_at(source, query, 7) == pytest.approx(value)


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("predict_linear(steady_total[2m] offset 3m, 60)", 480),
        ("predict_linear(steady_total[2m] @ 240, 60)", 480),
        ("predict_linear(steady_total[2m:1m] offset 3m, 60)", 480),
        ("deriv(steady_total[2m] offset 3m)", 1),
    ],
)
def test_a_prediction_counts_from_the_step_wherever_its_samples_are_from(
    source: StaticSource, query: str, value: float
) -> None:
    assert number_at(source, query, 7) == pytest.approx(value)


def test_nan_counts_as_the_smallest_in_a_quantile(source: StaticSource) -> None:
    assert math.isnan(number_at(source, "quantile_over_time(0, odd[10m])", 5))
    assert number_at(source, "quantile_over_time(1, odd[10m])", 5) == 3


def test_a_mean_survives_a_sum_that_overflows() -> None:
    source = load({"big": "1e308 1e308 1e308"})
    assert number_at(source, "avg_over_time(big[10m])", 3) == pytest.approx(1e308)
    assert number_at(source, "sum_over_time(big[10m])", 3) == math.inf


def test_functions_drop_the_name_but_the_last_sample_keeps_it(source: StaticSource) -> None:
    assert list(at(source, "last_over_time(gauge[10m])", 7)) == ["gauge{}"]
    assert list(at(source, "max_over_time(gauge[10m])", 7)) == ["{}"]


def test_two_series_that_differ_by_name_only_cannot_both_lose_it(source: StaticSource) -> None:
    with pytest.raises(ExecutionError, match="same labelset"):
        at(source, 'rate({__name__=~"steady_total|reset_total"}[5m])', 5)


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("abs(negative)", 2.5),
        ("ceil(negative)", -2),
        ("floor(negative)", -3),
        ("round(negative)", -2),  # halves go up
        ("round(negative, 2)", -2),
        ("sgn(negative)", -1),
        ("clamp(negative, -1, 1)", -1),
        ("clamp_min(negative, 0)", 0),
        ("clamp_max(negative, -3)", -3),
        ("exp(vector(0))", 1),
        ("ln(vector(0))", -math.inf),
        ("sqrt(vector(9))", 3),
        ("log2(vector(8))", 3),
        ("log10(vector(1000))", 3),
        ("sqrt(negative)", math.nan),
        ("deg(vector(pi()))", 180),
        ("scalar(negative)", -2.5),
        ("scalar({__name__=~'gauge|negative'})", math.nan),
        ("time()", 0),
        ("vector(1) / 0", math.inf),
        ("0 / vector(0)", math.nan),
        ("-7 % vector(3)", -1),
        ("2 ^ 3 ^ 2 + vector(0)", 512),
        ("vector(1) == bool 2", 0),
        ("-vector(1) ^ 2", -1),
    ],
)
def test_values_are_changed_one_by_one(source: StaticSource, query: str, value: float) -> None:
    assert number_at(source, query, 0) == pytest.approx(value, nan_ok=True)


def test_clamp_with_its_bounds_the_wrong_way_round_is_empty(source: StaticSource) -> None:
    assert at(source, "clamp(negative, 1, -1)", 0) == {}


@pytest.mark.parametrize(
    ("function", "value"),
    [
        ("year", 2024),
        ("month", 2),
        ("day_of_month", 29),
        ("day_of_week", 4),
        ("day_of_year", 60),
        ("days_in_month", 29),
        ("hour", 23),
        ("minute", 58),
    ],
)
def test_the_calendar_is_that_of_utc(source: StaticSource, function: str, value: float) -> None:
    leap_day = 1_709_251_080  # 2024-02-29T23:58:00Z
    assert number_at(source, f"{function}(vector({leap_day}))", 0) == value
    assert number_at(source, f"{function}()", leap_day / 60) == value


def test_the_timestamp_is_that_of_the_sample_or_of_the_step(source: StaticSource) -> None:
    assert number_at(source, "timestamp(gauge)", 8.5) == 420
    assert number_at(source, "timestamp(gauge + 0)", 8.5) == 510


def test_absent_carries_what_equality_asked_for(source: StaticSource) -> None:
    assert at(source, 'absent(nonexistent{job="myjob"})', 0) == {'{job="myjob"}': 1}
    assert at(source, 'absent(nonexistent{job="myjob",instance=~".*"})', 0) == {'{job="myjob"}': 1}
    assert at(source, 'absent(sum(nonexistent{job="myjob"}))', 0) == {"{}": 1}
    assert at(source, 'absent(nonexistent{job="a",job!="b"})', 0) == {"{}": 1}
    assert at(source, "absent(gauge)", 0) == {}
    assert at(source, 'absent_over_time(nonexistent{job="myjob"}[1h])', 0) == {'{job="myjob"}': 1}


def test_a_job_of_several_metrics_can_be_missed() -> None:
    source = load({'up{job="x"}': "1 _ _ 1", 'down{job="x"}': "1 _ _ _"})
    values = over(source, 'absent_over_time({job="x"}[90s])', 0, 3)['{job="x"}']
    assert [value == 1 for value in values] == [False, False, True, False]


def test_absent_speaks_at_the_steps_that_miss(source: StaticSource) -> None:
    values = over(source, "absent(nothing)", 4, 7)["{}"]
    assert [value == 1 for value in values] == [False, False, True, True]


def test_labels_are_replaced_where_the_whole_value_matches() -> None:
    source = load({'up{job="api-server", service="a:c"}': "1"})
    named = 'up{foo="a", job="api-server", service="a:c"}'
    assert at(source, 'label_replace(up, "foo", "$1", "service", "(.*):.*")', 0) == {named: 1}
    assert at(source, 'label_replace(up, "foo", "$name", "service", "(?P<name>.*):(?P<v>.*)")', 0) == {
        named: 1
    }
    unchanged = 'up{job="api-server", service="a:c"}'
    assert at(source, 'label_replace(up, "foo", "$1", "service", "(.*):")', 0) == {unchanged: 1}
    assert at(source, 'label_replace(up, "service", "", "service", ".*")', 0) == {'up{job="api-server"}': 1}


def test_labels_are_joined() -> None:
    source = load({'up{job="api-server", src1="a", src2="b", src3="c"}': "1"})
    (labels,) = at(source, 'label_join(up, "foo", ",", "src1", "src2", "src3")', 0)
    assert 'foo="a,b,c"' in labels


def test_a_replacement_that_makes_two_series_one_is_refused() -> None:
    source = load({'up{i="1"}': "1", 'up{i="2"}': "1"})
    with pytest.raises(ExecutionError, match="same labelset"):
        at(source, 'label_replace(up, "i", "x", "i", ".*")', 0)


def test_a_bad_expression_in_a_replacement_is_named(source: StaticSource) -> None:
    with pytest.raises(ExecutionError, match="label_replace"):
        at(source, 'label_replace(gauge, "a", "b", "c", "(")', 0)


def test_sort_puts_nan_last() -> None:
    source = load({'v{i="1"}': "3", 'v{i="2"}': "NaN", 'v{i="3"}': "1", 'v{i="10"}': "2"})
    assert list(at(source, "sort(v)", 0).values())[:3] == [1, 2, 3]
    assert list(at(source, "sort_desc(v)", 0).values())[:3] == [3, 2, 1]
    assert [label[4:-2] for label in at(source, 'sort_by_label(v, "i")', 0)] == ['"1', '"2', '"3', '"10']


BUCKETS = {
    'h_bucket{le="0.1"}': "1",
    'h_bucket{le="0.5"}': "3",
    'h_bucket{le="1"}': "3",
    'h_bucket{le="+Inf"}': "4",
    'h_bucket{le="nonsense"}': "9",
}


@pytest.mark.parametrize(
    ("quantile", "value"),
    [
        (0, 0),
        (0.125, 0.05),
        (0.25, 0.1),
        (0.5, 0.3),
        (0.75, 0.5),
        (0.9, 1),
        (1, 1),
        (-0.1, -math.inf),
        (1.1, math.inf),
        ("NaN", math.nan),
    ],
)
def test_a_quantile_lies_evenly_within_its_bucket(quantile: float, value: float) -> None:
    found = number_at(load(BUCKETS), f"histogram_quantile({quantile}, h_bucket)", 0)
    assert found == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    "buckets",
    [
        {'h_bucket{le="1"}': "1", 'h_bucket{le="2"}': "2"},
        {'h_bucket{le="+Inf"}': "2"},
        {'h_bucket{le="1"}': "0", 'h_bucket{le="+Inf"}': "0"},
    ],
)
def test_a_histogram_that_cannot_tell_gives_nan(buckets: dict[str, str]) -> None:
    assert math.isnan(number_at(load(buckets), "histogram_quantile(0.5, h_bucket)", 0))


def test_a_first_bucket_up_to_a_negative_bound_has_no_lower_end() -> None:
    source = load({'h_bucket{le="-1"}': "5", 'h_bucket{le="+Inf"}': "6"})
    assert number_at(source, "histogram_quantile(0.5, h_bucket)", 0) == -1


def test_counts_that_fall_from_one_bucket_to_the_next_are_lifted() -> None:
    source = load({'h_bucket{le="1"}': "4", 'h_bucket{le="2"}': "3", 'h_bucket{le="+Inf"}': "8"})
    assert number_at(source, "histogram_quantile(0.25, h_bucket)", 0) == pytest.approx(0.5)


def test_bounds_that_say_the_same_are_one_bucket() -> None:
    source = load({'h_bucket{le="1"}': "2", 'h_bucket{le="1.0"}': "2", 'h_bucket{le="+Inf"}': "8"})
    assert number_at(source, "histogram_quantile(0.25, h_bucket)", 0) == pytest.approx(0.5)
