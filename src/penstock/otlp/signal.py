"""The three kinds of telemetry that OTLP carries."""

from __future__ import annotations

import enum

__all__ = ["Signal"]


class Signal(enum.StrEnum):
    """One kind of telemetry: which request, which schema, which path `/v1/…`."""

    TRACES = "traces"
    METRICS = "metrics"
    LOGS = "logs"
