"""Time series: labels, samples and their formats, PromQL over them, and a database for them."""

from __future__ import annotations

from penstock.timeseries.bucket import Bucket
from penstock.timeseries.config import TimeSeriesConfig
from penstock.timeseries.database import TimeSeries
from penstock.timeseries.matcher import Matcher, MatchOp
from penstock.timeseries.model import Labels, Metadata, MetricType, Samples, Series, Temporality

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
