"""Time series: labels, samples and their formats, a database that stores them, and PromQL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.timeseries.api.answers import (
        Answer,
        error_answer,
        federation_answer,
        metadata_answer,
        names_answer,
        query_answer,
        reads_any_name,
        series_answer,
    )
    from penstock.timeseries.api.requests import (
        Parameters,
        SeriesRequest,
        instant_request,
        labels_request,
        metadata_request,
        range_request,
        series_request,
    )
    from penstock.timeseries.config import TimeSeriesConfig
    from penstock.timeseries.database import TimeSeries
    from penstock.timeseries.delta import check_series
    from penstock.timeseries.ingest import (
        BODY_BYTES_MAX,
        OtlpSeries,
        RemoteWrite,
        decode_remote_write,
        series_of_metrics,
        unpacked_size,
    )
    from penstock.timeseries.matchers import Matcher, MatchOp
    from penstock.timeseries.model import Bucket, Labels, Metadata, MetricType, Samples, Series, Temporality
    from penstock.timeseries.promql.engine import QueryResult
    from penstock.timeseries.promql.parser import is_read_at_once

__all__ = [
    "BODY_BYTES_MAX",
    "Answer",
    "Bucket",
    "Labels",
    "MatchOp",
    "Matcher",
    "Metadata",
    "MetricType",
    "OtlpSeries",
    "Parameters",
    "QueryResult",
    "RemoteWrite",
    "Samples",
    "Series",
    "SeriesRequest",
    "Temporality",
    "TimeSeries",
    "TimeSeriesConfig",
    "check_series",
    "decode_remote_write",
    "error_answer",
    "federation_answer",
    "instant_request",
    "is_read_at_once",
    "labels_request",
    "metadata_answer",
    "metadata_request",
    "names_answer",
    "query_answer",
    "range_request",
    "reads_any_name",
    "series_answer",
    "series_of_metrics",
    "series_request",
    "unpacked_size",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api.answers": (
                "Answer error_answer federation_answer metadata_answer names_answer query_answer "
                "reads_any_name series_answer"
            ),
            "api.requests": (
                "Parameters SeriesRequest instant_request labels_request metadata_request range_request "
                "series_request"
            ),
            "config": "TimeSeriesConfig",
            "database": "TimeSeries",
            "delta": "check_series",
            "ingest": (
                "BODY_BYTES_MAX OtlpSeries RemoteWrite decode_remote_write series_of_metrics unpacked_size"
            ),
            "matchers": "MatchOp Matcher",
            "model": "Bucket Labels Metadata MetricType Samples Series Temporality",
            "promql.engine": "QueryResult",
            "promql.parser": "is_read_at_once",
        },
    )
