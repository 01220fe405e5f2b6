"""The query engine: it parses and evaluates queries within limits.

prepared = engine.instant("sum(rate(requests_total[5m]))", at_ms)
prepared.selections                      # the data to read from storage first
result = prepared.evaluate(source)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import promql_parser as ast

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import ConfigError, InvalidInput
from penstock.timeseries.matchers import Matcher
from penstock.timeseries.model import NO_LABELS, Floats, Labels, Times
from penstock.timeseries.promql.aggregation import AGGREGATIONS
from penstock.timeseries.promql.evaluation import PARAMETRIC_AGGREGATIONS, Evaluation, SeriesSource
from penstock.timeseries.promql.functions import FUNCTIONS, call
from penstock.timeseries.promql.limits import BadRange, Budget, ParseError, labels_cost
from penstock.timeseries.promql.parser import out_of_range, parse
from penstock.timeseries.promql.tree import (
    Grid,
    OutOfRange,
    Placement,
    Selection,
    check_supported,
    matchers_of,
    selections,
    shared_selections,
    unwrapped,
)
from penstock.timeseries.promql.vectors import Scalars, Text, Vectors, Windows
from penstock.units import DurationLike, convert_units, seconds_of

_TIME_MAX_MS: Final = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits and defaults of queries. Raises `ConfigError` for a value out of range."""

    lookback: DurationLike = "5m"
    """Maximum age of a sample that counts as current. The default is that of Prometheus."""
    subquery_step: DurationLike = "1m"
    """Default step of a subquery."""
    samples_max: int = 20_000_000
    """Limit on samples read plus cells created. Each takes up to 110 bytes during evaluation, so 2.2 GB at
    most."""
    steps_max: int = 11_000
    """Limit on the steps between the first and the last point of a range query. The default allows a point
    per pixel of any screen, and a week in minutes. Clients divide their range by this number."""
    timeout: DurationLike = "2m"
    """Time limit of a query."""

    timeout_s = seconds_of("timeout")
    _lookback_s = seconds_of("lookback")
    _subquery_step_s = seconds_of("subquery_step")

    def __post_init__(self) -> None:
        convert_units(self)
        for name in ("lookback", "subquery_step", "timeout"):
            if getattr(self, name) < 0.001:
                raise ConfigError(f"{name} must be at least a millisecond")
        if self.samples_max < 1 or self.steps_max < 1:
            raise ConfigError("samples_max and steps_max must be at least 1")

    @property
    def lookback_ms(self) -> int:
        return round(self._lookback_s * 1000)

    @property
    def subquery_step_ms(self) -> int:
        return round(self._subquery_step_s * 1000)


class ResultType(enum.Enum):
    """The type of a result, as named in the HTTP API."""

    MATRIX = "matrix"
    VECTOR = "vector"
    SCALAR = "scalar"
    STRING = "string"


@dataclass(frozen=True, slots=True, eq=False)
class ResultSeries:
    """Points of one series. A vector and a scalar have one point each."""

    labels: Labels
    timestamps: Times
    values: Floats


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QueryResult:
    """The result of a query. `text` is used for strings only. A scalar is one series without labels."""

    result_type: ResultType
    series: Sequence[ResultSeries] = ()
    text: str = ""
    at_ms: int = 0
    samples_used: int = 0


class Engine:
    """Engine that prepares queries. It keeps no state between them, so threads may share it."""

    def __init__(self, config: EngineConfig | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._config = config or EngineConfig()
        self._clock = clock

    def instant(self, query: str, at_ms: int, *, timeout_s: float | None = None) -> Prepared:
        """Prepare a query at one time.

        Raises `ParseError`, `UnsupportedQuery`, or `InvalidInput` for a time out of range.
        """
        return self._prepared(query, Grid(_in_range(at_ms), 1, 1), timeout_s, instant=True)

    def range(
        self, query: str, start_ms: int, end_ms: int, step_ms: int, *, timeout_s: float | None = None
    ) -> Prepared:
        """Prepare a query at every step from start to end, inclusive.

        The expression must be a vector or a number. Raises `BadRange` and the errors of `instant`.
        """
        if end_ms < start_ms:
            raise BadRange("end timestamp must not be before start time")
        if step_ms <= 0:
            raise BadRange("zero or negative query resolution step widths are not accepted")
        steps = (_in_range(end_ms) - _in_range(start_ms)) // step_ms
        if steps > self._config.steps_max:
            raise BadRange(
                f"exceeded maximum resolution of {self._config.steps_max:,} points per timeseries. "
                "Try decreasing the query resolution (?step=XX)"
            )
        return self._prepared(query, Grid(start_ms, step_ms, steps + 1), timeout_s, instant=False)

    def _prepared(self, query: str, grid: Grid, timeout_s: float | None, *, instant: bool) -> Prepared:
        config, budget = self._config, self.budget(timeout_s)
        tree = unwrapped(parse(query))
        if not instant and isinstance(tree, ast.MatrixSelector | ast.SubqueryExpr | ast.StringLiteral):
            raise ParseError("a range query must be a scalar or an instant vector")
        check_supported(tree, FUNCTIONS, frozenset(AGGREGATIONS) | PARAMETRIC_AGGREGATIONS)
        placement = Placement(
            query=grid,
            lookback_ms=config.lookback_ms,
            subquery_step_ms=config.subquery_step_ms,
            steps_max=config.samples_max,
        )
        try:
            return Prepared(tree, grid, placement, budget, instant=instant)
        except (OutOfRange, OverflowError):  # the parser's durations overflow when they are read
            raise out_of_range(query) from None
        except InvalidInput as error:
            raise ParseError(str(error)) from None

    def budget(self, timeout_s: float | None = None) -> Budget:
        """Return the budget of a query or another read. Its time starts now."""
        limit = self._config.timeout_s
        return Budget(
            samples_max=self._config.samples_max,
            timeout_s=limit if timeout_s is None else min(limit, timeout_s),
            clock=self._clock,
        )


class Prepared:
    """A parsed query. Its time limit runs from its creation."""

    def __init__(
        self, tree: ast.Expr, grid: Grid, placement: Placement, budget: Budget, *, instant: bool
    ) -> None:
        self._tree = tree
        self._grid = grid
        self._placement = placement
        self._instant = instant
        self.budget = budget
        """The remaining budget of the query. Readers charge it."""
        self.selections: tuple[Selection, ...] = shared_selections(selections(tree, grid, placement))

    def evaluate(self, source: SeriesSource, *, charged: bool = False) -> QueryResult:
        """Evaluate the query over the series that `source` returns for `selections` and parts of them.

        Pass `charged` if the samples were charged to `budget` when they were read. Raises `ExecutionError`,
        `TooManySamples` or `QueryTimeout`.
        """
        evaluation = Evaluation(self._grid, self._placement, source, self.budget, call, charged=charged)
        if isinstance(self._tree, ast.MatrixSelector | ast.SubqueryExpr):
            return self._result(ResultType.MATRIX, _samples_of(evaluation.windows(self._tree)))
        value = evaluation.value(self._tree)
        if isinstance(value, Text):
            return QueryResult(result_type=ResultType.STRING, text=value.value, at_ms=self._grid.start_ms)
        times = self._grid.times
        if isinstance(value, Scalars):
            kind = ResultType.SCALAR if self._instant else ResultType.MATRIX
            return self._result(kind, [ResultSeries(NO_LABELS, times, value.values)])
        if self._instant:
            return self._result(ResultType.VECTOR, _points_of(value, times))
        ordered = sorted(_points_of(value, times), key=lambda series: series.labels)
        return self._result(ResultType.MATRIX, ordered)

    def _result(self, result_type: ResultType, series: list[ResultSeries]) -> QueryResult:
        for one in series:  # a response repeats the values of labels that series share in memory
            self.budget.charge(labels_cost(one.labels, 0))
        return QueryResult(
            result_type=result_type,
            series=series,
            at_ms=self._grid.start_ms,
            samples_used=self.budget.samples_used,
        )


def parse_selector(text: str) -> tuple[Matcher, ...]:
    """Return the matchers of a `match[]` parameter. Raises `ParseError` if it is not a plain selector."""
    tree = parse(text)
    if not isinstance(tree, ast.VectorSelector):
        raise ParseError("a series selector is expected")
    if _has_modifiers(tree):
        raise ParseError("offset and @ have no meaning in a series selector")
    check_supported(tree, frozenset(), frozenset())
    try:
        return matchers_of(tree)
    except InvalidInput as error:
        raise ParseError(str(error)) from None


def _has_modifiers(tree: ast.VectorSelector) -> bool:
    try:
        return tree.at is not None or tree.offset is not None
    except OverflowError:
        return True


def _in_range(time_ms: int) -> int:
    if abs(time_ms) > _TIME_MAX_MS:
        raise BadRange(f"{time_ms} ms is out of the range of timestamps")
    return time_ms


def _points_of(vectors: Vectors, times: Times) -> list[ResultSeries]:
    return [
        ResultSeries(labels, times[present], values[present])
        for labels, values, present in zip(vectors.labels, vectors.values, vectors.present, strict=True)
        if present.any()
    ]


def _samples_of(windows: Windows) -> list[ResultSeries]:
    """Return the samples of each row's only window."""
    rows = windows.rows
    bounds = np.stack((windows.low[:, 0], windows.high[:, 0]), axis=1).tolist()
    return [
        ResultSeries(labels, rows.timestamps[low:high], rows.values[low:high])
        for labels, (low, high) in zip(rows.labels, bounds, strict=True)
        if high > low
    ]
