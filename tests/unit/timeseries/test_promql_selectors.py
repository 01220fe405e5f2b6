"""The samples that a selector sees."""

from __future__ import annotations

import math

import pytest
from tests.unit.timeseries.promql_doubles import ENGINE, at, load, number_at, over

from penstock.timeseries.promql import FetchedSource, ResultType, StaticSource


@pytest.fixture
def source() -> StaticSource:
    return load(
        {
            'up{job="a", zone="1"}': "1 2 3 _ _ _ _ _ 9",
            'up{job="b"}': "5 stale",
            'down{job="a"}': "0 7 NaN",
        }
    )


def test_a_sample_counts_for_five_minutes_and_not_at_the_fifth(source: StaticSource) -> None:
    assert number_at(source, 'up{job="a"}', 6.999) == 3
    assert at(source, 'up{job="a"}', 7) == {}


def test_a_stale_marker_hides_a_series_immediately(source: StaticSource) -> None:
    assert number_at(source, 'up{job="b"}', 0.999) == 5
    assert at(source, 'up{job="b"}', 1) == {}


def test_a_series_comes_back_after_its_gap(source: StaticSource) -> None:
    values = over(source, 'up{job="a"}', 0, 9)['up{job="a", zone="1"}']
    assert values[:7] == [1, 2, 3, 3, 3, 3, 3]
    assert math.isnan(values[7])
    assert values[8:] == [9, 9]


def test_nan_is_a_value(source: StaticSource) -> None:
    assert math.isnan(number_at(source, "down", 2))


@pytest.mark.parametrize(
    ("selector", "jobs"),
    [
        ('up{zone="1"}', ["a"]),
        ('up{zone!="1"}', ["b"]),
        ('up{zone=""}', ["b"]),
        ('up{zone=~".+"}', ["a"]),
        ('up{job=~"a|b"}', ["a", "b"]),
        ('up{job!~"a|x"}', ["b"]),
        ('up{job=~"."}', ["a", "b"]),
        ('up{job=~""}', []),
        ('{__name__=~"u."}', ["a", "b"]),
    ],
)
def test_matchers_compare_whole_values_and_take_a_missing_label_as_empty(
    source: StaticSource, selector: str, jobs: list[str]
) -> None:
    assert [text.split('job="')[1][0] for text in at(source, selector, 0)] == jobs


def test_an_offset_looks_back_and_a_negative_one_ahead(source: StaticSource) -> None:
    assert number_at(source, 'up{job="a"} offset 1m', 2) == 2
    assert number_at(source, 'up{job="a"} offset -1m', 1) == 3


def test_at_fixes_the_time_of_every_step(source: StaticSource) -> None:
    label = 'up{job="a", zone="1"}'
    assert over(source, 'up{job="a"} @ 60', 0, 2)[label] == [2, 2, 2]
    assert over(source, 'up{job="a"} @ start()', 1, 3)[label] == [2, 2, 2]
    assert over(source, 'up{job="a"} @ end()', 0, 2)[label] == [3, 3, 3]
    assert over(source, 'up{job="a"} @ end() offset 1m', 0, 2)[label] == [2, 2, 2]


def test_a_range_is_open_at_the_left(source: StaticSource) -> None:
    result = ENGINE.instant('up{job="a"}[2m]', 120_000).evaluate(source)
    assert result.result_type is ResultType.MATRIX
    assert result.series[0].timestamps.tolist() == [60_000, 120_000]


def test_every_step_of_a_range_query_sees_a_window_open_at_the_left(source: StaticSource) -> None:
    assert over(source, 'count_over_time(up{job="a"}[2m])', 0, 3)['{job="a", zone="1"}'] == [1, 2, 2, 1]


def test_a_range_leaves_stale_markers_out(source: StaticSource) -> None:
    result = ENGINE.instant('up{job="b"}[10m]', 120_000).evaluate(source)
    assert result.series[0].values.tolist() == [5]


def test_a_subquery_steps_on_multiples_of_its_step(source: StaticSource) -> None:
    result = ENGINE.instant('up{job="a"}[2m:30s]', 125_000).evaluate(source)
    assert result.series[0].timestamps.tolist() == [30_000, 60_000, 90_000, 120_000]
    assert result.series[0].values.tolist() == [1, 2, 2, 3]


def test_a_subquery_is_open_at_the_left(source: StaticSource) -> None:
    result = ENGINE.instant('up{job="a"}[1m:30s]', 120_000).evaluate(source)
    assert result.series[0].timestamps.tolist() == [90_000, 120_000]


def test_a_query_says_beforehand_what_it_will_read(source: StaticSource) -> None:
    prepared = ENGINE.range("rate(up[2m]) + max_over_time(down[3m:1m] offset 1m)", 600_000, 660_000, 30_000)
    spans = {str(one.matchers[0]): (one.start_ms, one.end_ms) for one in prepared.selections}
    assert spans['__name__="up"'] == (480_001, 660_000)
    # The first inner step is the first minute after 600 - 60 - 180 s; from there the lookback.
    assert spans['__name__="down"'] == (420_000 - 300_000 + 1, 600_000)
    answers = {one: source.select(one.matchers, one.start_ms, one.end_ms) for one in prepared.selections}
    assert prepared.evaluate(FetchedSource(answers)).result_type is ResultType.MATRIX
