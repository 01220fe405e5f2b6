"""Prometheus' HTTP API over a time-series database, with remote write and OTLP ingest."""

from __future__ import annotations

from penstock.servers.timeseries.routes import serve_timeseries as serve
from penstock.servers.timeseries.settings import Acknowledge, TimeSeriesSettings

__all__ = ["Acknowledge", "TimeSeriesSettings", "serve"]
