"""Prometheus' HTTP API over a database of time series, with remote write and OTLP for writers."""

from __future__ import annotations

from penstock.servers.timeseries.routes import serve_timeseries as serve
from penstock.servers.timeseries.settings import Acknowledge, TimeSeriesSettings

__all__ = ["Acknowledge", "TimeSeriesSettings", "serve"]
