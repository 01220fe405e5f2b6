"""Rows as OTLP metrics, read back by the database's own reader."""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from tests.unit.spark.sinks.schemas import schema_of

from penstock.errors import ConfigError, InvalidInput
from penstock.services.timeseries_feed import METRICS_PAYLOAD as READ_PAYLOAD
from penstock.spark.sinks.options import split_options
from penstock.spark.sinks.series import (
    HOURS_MAX,
    LABEL_BYTES_MAX,
    METRICS_PAYLOAD,
    RECORD_BYTES,
    SERIES_BYTES_MAX,
    SERIES_FORMAT,
    SERIES_OPTIONS,
    SeriesColumns,
    metrics_records,
)
from penstock.timeseries import MetricType, Series, Temporality, delta, series_index
from penstock.timeseries.delta import check_series
from penstock.timeseries.ingest import series_of_metrics

DDL = "timestamp timestamp, value double, page string, country string"
AT = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
TIMES = pa.timestamp("us", "UTC")

Row = dict[str, object]


def at_us(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


def batch(rows: list[Row], **types: pa.DataType) -> pa.RecordBatch:
    known = {"timestamp": TIMES, "value": pa.float64(), "tags": pa.map_(pa.string(), pa.string())} | types
    names = list(rows[0])
    arrays = [pa.array([row[name] for row in rows], known.get(name, pa.string())) for name in names]
    return pa.RecordBatch.from_arrays(arrays, names)


def written(rows: list[Row], columns: SeriesColumns, ddl: str = DDL) -> list[Series]:
    """Return the series in the records of these rows, as the database reads them."""
    found: list[Series] = []
    for made in metrics_records([batch(rows)], columns, columns.layout(schema_of(ddl))):
        assert set(made.column("metadata").to_pylist()) == {METRICS_PAYLOAD}
        for record in made.column("value").to_pylist():
            series = series_of_metrics(ExportMetricsServiceRequest.FromString(record))
            assert series.rejected_points == 0
            check_series(series.series)
            found += series.series
    return found


def points(series: list[Series]) -> list[tuple[frozenset[tuple[str, str]], int, float]]:
    return [
        (frozenset(one.labels), int(at), float(value))
        for one in series
        for at, value in zip(one.samples.timestamps, one.samples.values, strict=True)
    ]


def test_the_limits_and_the_payload_are_those_of_the_database() -> None:
    assert METRICS_PAYLOAD == READ_PAYLOAD
    assert LABEL_BYTES_MAX == series_index.LABEL_BYTES_MAX
    assert SERIES_BYTES_MAX == series_index.SERIES_BYTES_MAX
    assert HOURS_MAX == delta.HOURS_MAX


labels = st.one_of(st.none(), st.text(st.characters(codec="utf-8"), min_size=1, max_size=150))
rows_of_points = st.lists(
    st.fixed_dictionaries(
        {
            "timestamp": st.integers(1_000_000, 7_000_000_000_000_000).map(at_us),
            "value": st.floats(allow_nan=False),
            "page": labels,
            "country": labels,
            "metric": st.sampled_from(["a", "b:c", "_d9"]),
            "tags": st.one_of(
                st.none(),
                st.dictionaries(st.sampled_from(["x", "y_1"]), labels).map(lambda d: list(d.items())),
            ),
        }
    ),
    min_size=1,
    max_size=12,
)


def expected(row: Row) -> tuple[frozenset[tuple[str, str]], int, float]:
    tags, at, value = row["tags"] or [], row["timestamp"], row["value"]
    assert isinstance(tags, list)
    assert isinstance(at, datetime)
    assert isinstance(value, float)
    pairs = [("__name__", row["metric"]), ("page", row["page"]), ("country", row["country"]), *tags]
    at_ms = (at - at_us(0)) // timedelta(milliseconds=1)
    return frozenset((str(name), str(text)) for name, text in pairs if text), at_ms, value


@given(rows_of_points)
def test_every_row_is_one_point_with_its_labels(rows: list[Row]) -> None:
    columns = SeriesColumns(metric_column="metric")
    found = points(written(rows, columns, f"{DDL}, metric string, tags map<string,string>"))
    assert Counter(found) == Counter(expected(row) for row in rows)


def row(**more: object) -> Row:
    return {"timestamp": AT, "value": 1.0, "page": "/", "country": None} | more


def test_a_counter_is_a_monotonic_cumulative_sum() -> None:
    (one,) = written([row()], SeriesColumns(metric="clicks", kind="counter", unit="1", description="Clicks."))
    assert one.labels.metric == "clicks_total"
    about = one.metadata
    assert (about.metric_type, about.temporality, about.monotonic) == (
        MetricType.SUM,
        Temporality.CUMULATIVE,
        True,
    )
    assert (about.unit, about.description) == ("1", "Clicks.")


def test_only_listed_columns_are_labels() -> None:
    (one,) = written([row(country="de")], SeriesColumns(metric="m", labels=("page",)))
    assert dict(one.labels) == {"__name__": "m", "page": "/"}


def test_many_points_make_records_of_a_bounded_size() -> None:
    count = 30_000
    made = pa.RecordBatch.from_pydict(
        {
            "timestamp": pa.array(np.arange(count) * 1_000_000 + 1_700_000_000_000_000, TIMES),
            "value": np.arange(count, dtype=np.float64),
            "page": pa.array(["/a/long/page"] * count),
            "country": pa.nulls(count, pa.string()),
        }
    )
    columns = SeriesColumns(metric="m")
    (records,) = metrics_records([made, made[:0]], columns, columns.layout(schema_of(DDL)))
    sizes = [len(record) for record in records.column("value").to_pylist()]
    assert len(sizes) > 1
    assert max(sizes) < RECORD_BYTES + 100
    assert sum(sizes) > (len(sizes) - 1) * RECORD_BYTES * 0.99


@pytest.mark.parametrize("metrics", [1, 3])
def test_years_of_points_in_any_order_become_records_that_the_database_accepts(metrics: int) -> None:
    hours = np.random.default_rng(0).permutation(2 * HOURS_MAX + 1).tolist()
    rows = [row(timestamp=AT - timedelta(hours=hour), metric=f"m{hour % metrics}") for hour in hours]
    rows += [one | {"value": 2.0} for one in rows]
    found = points(written(rows, SeriesColumns(metric_column="metric"), f"{DDL}, metric string"))
    assert len(found) == len(rows)
    last = {(labels, at): value for labels, at, value in found}
    assert len(last) == len(hours)
    assert set(last.values()) == {2.0}


def test_whole_numbers_become_the_nearest_float() -> None:
    columns, largest = SeriesColumns(metric="m"), 2**63 - 1
    made = batch([row(value=largest)], value=pa.int64())
    (records,) = metrics_records([made], columns, columns.layout(schema_of(DDL.replace("double", "bigint"))))
    (record,) = records.column("value").to_pylist()
    (one,) = series_of_metrics(ExportMetricsServiceRequest.FromString(record)).series
    assert one.samples.values.tolist() == [float(largest)]


def test_points_of_one_series_and_time_keep_the_order_of_their_rows() -> None:
    (one,) = written([row(value=1.0), row(value=2.0)], SeriesColumns(metric="m"))
    assert one.samples.values.tolist() == [1.0, 2.0]


WRONG_ROWS: dict[str, tuple[list[Row], str]] = {
    "no value": ([row(), row(value=None)], "value is null in 1 rows"),
    "no time": ([row(timestamp=None)], "timestamp is null in 1 rows"),
    "before 1970": ([row(timestamp=datetime(1969, 1, 1, tzinfo=UTC))], "not between 1970 and 2554"),
    "a label too long": ([row(page="x" * LABEL_BYTES_MAX)], "page has a text of 16384 bytes"),
    "labels too long": (
        [row(tags=[(f"t{n}", "x" * 15_000) for n in range(5)])],
        "labels of a row together exceed 65536 bytes",
    ),
    "no metric": ([row(metric=None)], "metric is null in 1 rows"),
    "a metric's name": ([row(metric="a b")], "metric is 'a b' in some rows"),
    "a label's name": ([row(tags=[("a-b", "1")])], "tags has the key 'a-b'"),
    "a reserved name": ([row(tags=[("__name__", "1")])], "tags has the key '__name__'"),
    "a label twice": ([row(tags=[("page", "1")])], "tags has the key 'page'"),
}


@pytest.mark.parametrize("case", sorted(WRONG_ROWS))
def test_rows_that_the_database_would_reject_are_reported_before_anything_is_stored(case: str) -> None:
    rows, problem = WRONG_ROWS[case]
    named = {"metric_column": "metric"} if "metric" in rows[0] else {"metric": "m"}
    more = "".join(f", {name} {ddl}" for name, ddl in MORE.items() if name in rows[0])
    with pytest.raises(InvalidInput, match=re.escape(problem)):
        written(rows, SeriesColumns(**named), DDL + more)


MORE = {"metric": "string", "tags": "map<string,string>"}

WRONG_COLUMNS: dict[str, tuple[str, dict[str, str], str]] = {
    "no value": ("timestamp timestamp", {}, "no column 'value'; they have timestamp"),
    "a text as value": ("timestamp timestamp, value string", {}, "'value' is string, and must be a number"),
    "a text as time": ("timestamp string, value int", {}, "'timestamp' is string, and must be a timestamp"),
    "a number as label": (f"{DDL}, n int", {}, "'n' is int, but a label is a string"),
    "a name that is none": (f"{DDL}, `a b` string", {}, "'a b' cannot be the name of a label"),
    "a reserved name": (f"{DDL}, __x string", {}, "'__x' cannot be the name of a label"),
    "no such label": (DDL, {"labels": "page, town"}, "no column 'town'"),
    "two maps": (f"{DDL}, a map<string,string>, b map<string,string>", {}, "a and b are maps"),
}


@pytest.mark.parametrize("case", sorted(WRONG_COLUMNS))
def test_columns_that_are_not_a_point_are_reported_before_anything_runs(case: str) -> None:
    ddl, options, problem = WRONG_COLUMNS[case]
    with pytest.raises(ConfigError, match=re.escape(problem)):
        SeriesColumns.parse({"metric": "m"} | options).layout(schema_of(ddl))


WRONG_OPTIONS: dict[str, tuple[dict[str, str], str]] = {
    "no metric": ({}, "give either `metric`"),
    "two metrics": ({"metric": "a", "metric_column": "b"}, "give either `metric`"),
    "a bad name": ({"metric": "1a"}, "metric: expected letters"),
    "a kind": ({"metric": "a", "kind": "sum"}, "expected counter or gauge, found 'sum'"),
    "a column twice": ({"metric": "a", "labels": "value"}, "named twice"),
    "an unknown one": ({"metric": "a", "label": "x"}, "did you mean 'labels'"),
    "shards": ({"metric": "a", "sharded": "true"}, "unknown key"),
}


@pytest.mark.parametrize("case", sorted(WRONG_OPTIONS))
def test_options_that_cannot_work_are_reported(case: str) -> None:
    options, problem = WRONG_OPTIONS[case]
    with pytest.raises(ConfigError, match=re.escape(problem)):
        SeriesColumns.parse(split_options({"store": "q"} | options, SERIES_OPTIONS, SERIES_FORMAT)[0])


def test_options_survive_a_round_trip() -> None:
    columns = SeriesColumns(metric_column="m", value="v", labels=("a", "b"), kind="counter", unit="s")
    assert SeriesColumns.parse(columns.to_options()) == columns
    none = SeriesColumns(metric="m", labels=())
    assert SeriesColumns.parse(none.to_options()) == none
