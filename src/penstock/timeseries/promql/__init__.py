"""PromQL: queries over series, evaluated for all steps of a range together.

`Engine` prepares a query, a `SeriesSource` provides its samples, and the result is a `QueryResult`. The
semantics are those that Prometheus documents: samples up to five minutes old count as current, windows are
open on the left, stale markers end a series, and counters are extrapolated to the edges of their window.
Unsupported features are refused by name; see `docs/reference/promql.md`.
"""

from __future__ import annotations

from penstock.timeseries.promql.engine import (
    Engine,
    EngineConfig,
    Prepared,
    QueryResult,
    ResultSeries,
    ResultType,
    parse_selector,
)
from penstock.timeseries.promql.evaluation import FetchedSource, SelectedSeries, SeriesSource, StaticSource
from penstock.timeseries.promql.limits import (
    BadRange,
    Budget,
    ExecutionError,
    ParseError,
    QueryTimeout,
    TooManySamples,
    UnsupportedQuery,
)
from penstock.timeseries.promql.parser import QUERY_CHARACTERS_MAX, is_read_at_once
from penstock.timeseries.promql.tree import Selection

__all__ = [
    "QUERY_CHARACTERS_MAX",
    "BadRange",
    "Budget",
    "Engine",
    "EngineConfig",
    "ExecutionError",
    "FetchedSource",
    "ParseError",
    "Prepared",
    "QueryResult",
    "QueryTimeout",
    "ResultSeries",
    "ResultType",
    "SelectedSeries",
    "Selection",
    "SeriesSource",
    "StaticSource",
    "TooManySamples",
    "UnsupportedQuery",
    "is_read_at_once",
    "parse_selector",
]
