"""The engine, which evaluates all steps together, against a reference that evaluates one step at a time."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import promql_parser as ast
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.timeseries.promql_reference import Conflict, Reference, bits

from penstock.timeseries import Labels, Samples, Series
from penstock.timeseries.model import STALE_BITS, STALE_MARKER
from penstock.timeseries.promql import (
    Engine,
    ExecutionError,
    ParseError,
    StaticSource,
    TooManySamples,
    UnsupportedQuery,
)

pytestmark = pytest.mark.properties

START_MS = 1_700_000_040_000
NAMES = [{"__name__": name, "job": job} for name in ("a", "b") for job in ("x", "y")] + [
    {"__name__": "a", "job": "x", "zone": "1"},
    {"__name__": "a", "job": "x", "zone": "2"},
    {"__name__": "b", "zone": "1"},
]
BUCKETS = [{"__name__": "h_bucket", "job": job, "le": le} for job in "xy" for le in ("0.1", "1", "+Inf")]

QUERIES = [
    "a", 'a{job="x"}', 'a{zone!=""}', 'a{zone=""}', '{job=~"x|y",zone!~"1"}', "a offset 2m", "a offset -1m",
    "a @ 1700000200", "a @ start()", "a @ end() offset 1m", "-a", "1 - -a", "time() + 1", "rate(a[3m])",
    "increase(a[2m])", "delta(a[4m])", "irate(a[3m])", "idelta(a[3m])", "rate(a[3m] offset 1m)",
    "rate(a[3m] @ 1700000300)", "resets(a[5m])", "changes(a[5m])", "deriv(b[4m])",
    "predict_linear(b[4m], 60)", "sum_over_time(a[3m])", "avg_over_time(a[3m])", "min_over_time(a[3m])",
    "max_over_time(a[3m])", "count_over_time(a[3m])", "last_over_time(a[3m])", "present_over_time(a[3m])",
    "stddev_over_time(b[3m])", "stdvar_over_time(b[3m])", "quantile_over_time(0.3, a[5m])",
    "quantile_over_time(time() % 2, a[5m])", "sum(a)", "sum by (job) (a)", "sum without (zone) (a)",
    "avg by (job) (a)", "min(a)", "max by (zone) (a)", "count by (job) ({job!=''})", "group(a)",
    "stddev by (job) (b)", "stdvar(b)", "quantile(0.7, a)", "quantile by (job) (0.5, a)", "topk(2, a)",
    "bottomk by (job) (1, a)", "topk(1 + time() % 3, a)", "a + 1", "2 * a", "a % 7", "a ^ 2", "a / 0",
    "a > 10", "10 > a", "a > bool 10", "a == a", "a != bool 3", "a + b", "a + on (job) b",
    "a - ignoring (zone) b", "a * on (job) group_left b", "b * on (job) group_right a",
    "a / on (job) group_left (zone) b", "a > on (job) b", "a > b", "a == bool on (job) b",
    "b < on (job) group_right a", "a and b", "a and on (job) b", "a or b", "a or on (job) b", "a unless b",
    "a unless on (zone) b", "a and ignoring (zone) b", "abs(b)", "round(a, 5)", "round(b)",
    "clamp(a, 3, 20)", "timestamp(a)", "timestamp(a + 1)", "scalar(b)", "vector(3)", "scalar(a) + a",
    "absent(missing)", "absent(a)", "histogram_quantile(0.9, h_bucket)",
    "histogram_quantile(0.5, rate(h_bucket[3m]))", "histogram_quantile(0.5, sum by (le) (h_bucket))",
    "max_over_time(rate(a[2m])[4m:1m])", "sum_over_time(a[5m:30s] offset 30s)",
    "avg_over_time((a + 1)[3m:])", "count_over_time(vector(time())[3m:45s])",
    "sum(rate(a[3m])) by (job) / on (job) group_left sum by (job) (b)",
]  # fmt: skip

VALUES = st.one_of(
    st.integers(0, 30).map(float),
    st.floats(-1e6, 1e6).map(lambda value: round(value, 3)),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, float(STALE_MARKER)]),
)
COUNTS = st.one_of(st.integers(0, 9).map(float), st.just(float(STALE_MARKER)))


@st.composite
def some_series(draw: st.DrawFn, names: list[dict[str, str]], values: st.SearchStrategy[float]) -> Any:
    found = {}
    for labels in names:
        gaps = draw(st.lists(st.integers(1, 24), max_size=12))
        at, samples = START_MS - draw(st.integers(0, 400)) * 1000, []
        for gap in gaps:
            at += gap * 5000
            samples.append((at, draw(values)))
        if samples:
            found[frozenset(labels.items())] = samples
    return found


def reference_of(query: str, series: Any, times: list[int]) -> Any:
    reference = Reference(series, times[0], times[-1])
    tree = ast.parse(query)
    try:
        return [reference.value(tree, t) for t in times]
    except Conflict:
        return None


def engine_of(query: str, series: Any, times: list[int]) -> Any:
    source = StaticSource(
        [Series(labels=Labels.of(labels), samples=Samples.of(samples)) for labels, samples in series.items()]
    )
    step = times[1] - times[0]
    try:
        result = Engine().range(query, times[0], times[-1], step).evaluate(source)
    except ExecutionError:
        return None
    found: list[dict[Any, float]] = [{} for _ in times]
    for one in result.series:
        for at, value in zip(one.timestamps.tolist(), one.values.tolist(), strict=True):
            found[times.index(at)][frozenset(one.labels)] = value
    return found


def same(ours: float, theirs: float) -> bool:
    if math.isnan(ours) or math.isnan(theirs):
        return math.isnan(ours) and math.isnan(theirs)
    return math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-6)


def assert_same(query: str, series: Any, step_ms: int) -> None:
    times = [START_MS + step_ms * number for number in range(6)]
    expected, found = reference_of(query, series, times), engine_of(query, series, times)
    if expected is None or found is None:
        assert expected == found, (query, expected, found)
        return
    for want, got in zip(expected, found, strict=True):
        want = want if isinstance(want, dict) else {frozenset(): want}
        assert want.keys() == got.keys(), (query, want, got)
        for labels, value in want.items():
            assert same(got[labels], value), (query, labels, value, got[labels])


@pytest.mark.parametrize("first", range(0, len(QUERIES), 12))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    series=some_series(NAMES, VALUES),
    buckets=some_series(BUCKETS, COUNTS),
    step_ms=st.sampled_from([5_000, 17_000, 60_000]),
)
def test_every_step_at_once_equals_one_step_at_a_time(
    first: int, series: Any, buckets: Any, step_ms: int
) -> None:
    for query in QUERIES[first : first + 12]:
        assert_same(query, buckets if "bucket" in query else series, step_ms)


def test_a_stale_marker_of_the_examples_has_its_bits() -> None:
    assert bits(float(STALE_MARKER)) == STALE_BITS


PLACES = [
    "x[{}]", "x[5m:{}]", "x offset {}", "x offset -{}", "x @ {}", "x[5m] @ {} offset {}", "rate(x[{}:{}])",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    place=st.sampled_from(PLACES),
    number=st.floats(min_value=0) | st.integers(min_value=0),
    unit=st.sampled_from(["", "", "ms", "s", "m", "h", "d", "w", "y"]),
)
def test_any_number_is_a_duration_or_a_time_or_refused(place: str, number: float, unit: str) -> None:
    text = f"{number}{unit}"
    with suppress(ParseError, UnsupportedQuery, TooManySamples):
        Engine().instant(place.format(text, text), START_MS)
