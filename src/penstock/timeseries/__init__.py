"""Time series: labels, samples and their formats, PromQL over them, and a database for them."""

from __future__ import annotations

from penstock.timeseries.config import TimeSeriesConfig
from penstock.timeseries.database import TimeSeries
from penstock.timeseries.matchers import Matcher, MatchOp
from penstock.timeseries.model import Bucket, Labels, Metadata, MetricType, Samples, Series, Temporality

__all__ = [
    "Bucket",
    "Labels",
    "MatchOp",
    "Matcher",
    "Metadata",
    "MetricType",
    "Samples",
    "Series",
    "Temporality",
    "TimeSeries",
    "TimeSeriesConfig",
]
