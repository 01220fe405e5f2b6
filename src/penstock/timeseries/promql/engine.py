"""Queries from text to answer, within limits.

prepared = engine.instant("sum(rate(requests_total[5m]))", at_ms)
prepared.selections                      # what storage has to provide, to be awaited first
result = prepared.evaluate(source)
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
import promql_parser as ast

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import ConfigError, InvalidInput
from penstock.timeseries.matchers import Matcher, select_labels
from penstock.timeseries.model import NO_LABELS, Floats, Labels, Samples, Series, Times
from penstock.timeseries.promql import aggregation, binary
from penstock.timeseries.promql.aggregation import AGGREGATIONS
from penstock.timeseries.promql.binary import SET_OPERATORS
from penstock.timeseries.promql.functions import FUNCTIONS, call
from penstock.timeseries.promql.limits import BadRange, Budget, ParseError, labels_cost
from penstock.timeseries.promql.syntax import bad_expression, out_of_range, parse
from penstock.timeseries.promql.tree import (
    Grid,
    OutOfRange,
    Placement,
    Selection,
    check_supported,
    literal_text,
    matchers_of,
    milliseconds,
    selections,
    shared_selections,
    unwrapped,
)
from penstock.timeseries.promql.vectors import Rows, Scalars, Text, Value, Vectors, Windows, latest
from penstock.units import DurationLike, convert_units, seconds_of

SelectedSeries: TypeAlias = tuple[Labels, Times, Floats]
"""Labels, timestamps in rising order without repetition, and their values."""


class SeriesSource(Protocol):
    """Answers selectors. It is asked from the thread that evaluates, and may be asked twice for the same."""

    def select(self, matchers: Sequence[Matcher], start_ms: int, end_ms: int) -> list[SelectedSeries]:
        """Every series that satisfies all matchers, with its samples in `[start_ms, end_ms]`.

        Each label set comes once; stale markers are included.
        """
        ...


@dataclass(frozen=True, slots=True)
class FetchedSource:
    """What was read beforehand, selection by selection: for storage that has to be awaited.

    A selection answers for every one that it covers.
    """

    answers: Mapping[Selection, list[SelectedSeries]]

    def select(self, matchers: Sequence[Matcher], start_ms: int, end_ms: int) -> list[SelectedSeries]:
        wanted = Selection(tuple(matchers), start_ms, end_ms)
        if wanted in self.answers:
            return self.answers[wanted]
        covering = next(one for one in self.answers if one.covers(wanted))
        return _between(self.answers[covering], start_ms, end_ms)


class StaticSource:
    """Series in memory."""

    def __init__(self, series: Sequence[Series]) -> None:
        parts: dict[Labels, list[Samples]] = {}
        for one in series:
            parts.setdefault(one.labels, []).append(one.samples)
        self._labels = list(parts)
        self._samples = [Samples.joined(samples).in_order() for samples in parts.values()]

    def select(self, matchers: Sequence[Matcher], start_ms: int, end_ms: int) -> list[SelectedSeries]:
        found: list[SelectedSeries] = []
        for row in select_labels(matchers, self._labels):
            samples = self._samples[row].between(start_ms, end_ms)
            if len(samples):
                found.append((self._labels[row], samples.timestamps, samples.values))
        return found


def _between(series: Sequence[SelectedSeries], start_ms: int, end_ms: int) -> list[SelectedSeries]:
    """What lies within the times, as views; series without any of it are left out."""
    found: list[SelectedSeries] = []
    for labels, timestamps, values in series:
        low, high = np.searchsorted(timestamps, (start_ms, end_ms + 1)).tolist()
        if high > low:
            found.append((labels, timestamps[low:high], values[low:high]))
    return found


PARAMETRIC_AGGREGATIONS: Final = frozenset({"bottomk", "count_values", "quantile", "topk"})
_CARDINALITIES: Final = (
    (ast.VectorMatchCardinality.ManyToOne, binary.Cardinality.MANY_TO_ONE),
    (ast.VectorMatchCardinality.OneToMany, binary.Cardinality.ONE_TO_MANY),
)


class Evaluation:
    """One query, or one subquery, over the steps of `grid`."""

    def __init__(
        self, grid: Grid, placement: Placement, source: SeriesSource, budget: Budget, *, charged: bool
    ) -> None:
        self.grid = grid
        self.budget = budget
        self._placement = placement
        self._source = source
        self._charged = charged

    def value(self, node: ast.Expr) -> Value:
        """What the node is worth. Raises `ExecutionError`, `TooManySamples` or `QueryTimeout`."""
        node = unwrapped(node)
        if isinstance(node, ast.VectorSelector):
            return self.latest(node)[0]
        if isinstance(node, ast.NumberLiteral):
            return Scalars(np.full(self.grid.count, node.val))
        if isinstance(node, ast.StringLiteral):
            return Text(node.val)
        self.budget.charge(self.grid.count)
        if isinstance(node, ast.UnaryExpr):
            return self._negated(node)
        if isinstance(node, ast.BinaryExpr):
            return self._binary(node)
        if isinstance(node, ast.AggregateExpr):
            return self._aggregate(node)
        assert isinstance(node, ast.Call), node
        return call(self, node.func.name, list(node.args))

    def vectors(self, node: ast.Expr) -> Vectors:
        """A node that the parser has checked to be a vector."""
        value = self.value(node)
        assert isinstance(value, Vectors)
        return value

    def scalars(self, node: ast.Expr) -> Scalars:
        """A node that the parser has checked to be a number."""
        value = self.value(node)
        assert isinstance(value, Scalars)
        return value

    def latest(self, node: ast.VectorSelector) -> tuple[Vectors, Times]:
        """The newest sample of each series within the lookback, and when it was taken."""
        lookback_ms = self._placement.lookback_ms
        rows = self._rows(node, lookback_ms)
        self.budget.charge(len(rows.labels) * self.grid.count)
        return latest(rows, self._placement.times(node, self.grid), lookback_ms)

    def windows(self, node: ast.Expr) -> Windows:
        """The samples that each step of a range vector sees."""
        node = unwrapped(node)
        if isinstance(node, ast.SubqueryExpr):
            rows = self._subquery(node)
            ends, range_ms = self._placement.times(node, self.grid), milliseconds(node.range)
        else:
            assert isinstance(node, ast.MatrixSelector)
            range_ms = milliseconds(node.range)
            rows = self._rows(node.vector_selector, range_ms).without_stale()
            ends = self._placement.times(node.vector_selector, self.grid)
        self.budget.charge(len(rows.labels) * self.grid.count)
        return Windows.over(rows, ends, range_ms, self.budget.check)

    def _rows(self, node: ast.VectorSelector, range_ms: int) -> Rows:
        wanted = self._placement.selection(node, self.grid, range_ms)
        series = self._source.select(wanted.matchers, wanted.start_ms, wanted.end_ms)
        if not self._charged:
            self.budget.charge(sum(len(timestamps) for _, timestamps, _ in series))
        return Rows.of(series)

    def _subquery(self, node: ast.SubqueryExpr) -> Rows:
        """The inner expression at its own steps, as if each step had been a sample."""
        grid = self._placement.inner_grid(node, self.grid)
        if not grid.count:
            return Rows.of([])
        inner = self._within(grid).vectors(node.expr)
        times = grid.times
        return Rows.of(
            [
                (labels, times[present], values[present])
                for labels, values, present in zip(inner.labels, inner.values, inner.present, strict=True)
            ]
        )

    def _within(self, grid: Grid) -> Evaluation:
        return Evaluation(grid, self._placement, self._source, self.budget, charged=self._charged)

    def _negated(self, node: ast.UnaryExpr) -> Value:
        value = self.value(node.expr)
        if isinstance(value, Scalars):
            return Scalars(-value.values)
        assert isinstance(value, Vectors)
        return value.with_values(-value.values)

    def _binary(self, node: ast.BinaryExpr) -> Value:
        op, modifier = str(node.op), node.modifier
        left, right = self.value(node.lhs), self.value(node.rhs)
        assert not isinstance(left, Text)
        assert not isinstance(right, Text)
        if isinstance(left, Scalars) and isinstance(right, Scalars):
            return binary.between_scalars(op, left, right)
        as_bool = modifier is not None and modifier.return_bool
        if isinstance(left, Scalars) or isinstance(right, Scalars):
            return binary.with_scalars(op, left, right, as_bool=as_bool)
        matching = _matching(modifier)
        if op in SET_OPERATORS:
            return binary.set_operation(op, left, right, matching, self.budget)
        return binary.between_vectors(op, left, right, matching, self.budget, as_bool=as_bool)

    def _aggregate(self, node: ast.AggregateExpr) -> Vectors:
        op, vectors, grouping = str(node.op), self.vectors(node.expr), _grouping(node.modifier)
        if op not in PARAMETRIC_AGGREGATIONS:
            return aggregation.aggregate(op, vectors, grouping, self.budget)
        assert node.param is not None
        if op == "count_values":
            return aggregation.count_values(vectors, grouping, literal_text(node.param), self.budget)
        parameter = self.scalars(node.param).values
        if op == "quantile":
            return aggregation.quantile(vectors, grouping, parameter, self.budget)
        largest = op == "topk"
        return aggregation.select_extremes(vectors, grouping, parameter, self.budget, largest=largest)


def _grouping(modifier: ast.AggModifier | None) -> aggregation.Grouping:
    if modifier is None:
        return aggregation.Grouping()
    return aggregation.Grouping(modifier.type == ast.AggModifierType.By, tuple(modifier.labels))


def _matching(modifier: ast.BinModifier | None) -> binary.Matching:
    if modifier is None:
        return binary.Matching()
    cardinality = binary.Cardinality.ONE_TO_ONE
    for theirs, own in _CARDINALITIES:
        cardinality = own if modifier.card == theirs else cardinality
    matching = modifier.matching
    return binary.Matching(
        cardinality=cardinality,
        on=matching is not None and matching.type == ast.LabelModifierType.Include,
        labels=() if matching is None else tuple(matching.labels),
        include=tuple(modifier.group_labels or ()),
    )


_TIME_MAX_MS: Final = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits and defaults of queries. Raises `ConfigError` for a value out of its range."""

    lookback: DurationLike = "5m"
    """How old a sample may be to stand for now; what Prometheus uses."""
    subquery_step: DurationLike = "1m"
    """The step of a subquery that names none."""
    samples_max: int = 20_000_000
    """Samples read and cells made. Each takes up to 110 bytes while it is worked on, so 2.2 GB at most."""
    steps_max: int = 11_000
    """Steps between the first and the last point of a range query: a point per pixel of any screen, and a
    week by the minute. Clients divide their range by this."""
    timeout: DurationLike = "2m"
    """How long a query may take."""

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
    """What an answer holds, in the words of the HTTP API."""

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
    """An answer. `text` is for a string only; `series` of a scalar is one without labels."""

    result_type: ResultType
    series: Sequence[ResultSeries] = ()
    text: str = ""
    at_ms: int = 0
    samples_used: int = 0


class Engine:
    """Prepares queries. Holds no state between them, so one serves any number of threads."""

    def __init__(self, config: EngineConfig | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._config = config or EngineConfig()
        self._clock = clock

    def instant(self, query: str, at_ms: int, *, timeout_s: float | None = None) -> Prepared:
        """A query at one time.

        Raises `ParseError`, `UnsupportedQuery`, or `InvalidInput` for a time out of range.
        """
        return self._prepared(query, Grid(_in_range(at_ms), 1, 1), timeout_s, instant=True)

    def range(
        self, query: str, start_ms: int, end_ms: int, step_ms: int, *, timeout_s: float | None = None
    ) -> Prepared:
        """A query at every step from start to end, both included.

        Raises `BadRange`, and what `instant` raises. The expression has to be a vector or a number.
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
            raise ParseError("a range query has to be a scalar or an instant vector", 1, 1)
        check_supported(tree, FUNCTIONS, frozenset(AGGREGATIONS) | PARAMETRIC_AGGREGATIONS)
        placement = Placement(
            query=grid,
            lookback_ms=config.lookback_ms,
            subquery_step_ms=config.subquery_step_ms,
            steps_max=config.samples_max,
        )
        try:
            return Prepared(tree, grid, placement, budget, instant=instant)
        except (OutOfRange, OverflowError):  # the parser's own durations overflow when they are looked at
            raise out_of_range(query) from None
        except InvalidInput as error:
            raise bad_expression(query, str(error)) from None

    def budget(self, timeout_s: float | None = None) -> Budget:
        """What a query may take, or whatever else is read; its time runs from now."""
        limit = self._config.timeout_s
        return Budget(
            samples_max=self._config.samples_max,
            timeout_s=limit if timeout_s is None else min(limit, timeout_s),
            clock=self._clock,
        )


class Prepared:
    """A query that has been read. Its time runs from here."""

    def __init__(
        self, tree: ast.Expr, grid: Grid, placement: Placement, budget: Budget, *, instant: bool
    ) -> None:
        self._tree = tree
        self._grid = grid
        self._placement = placement
        self._instant = instant
        self.budget = budget
        """What is left of what the query may take. Who reads for it charges it."""
        self.selections: tuple[Selection, ...] = shared_selections(selections(tree, grid, placement))

    def evaluate(self, source: SeriesSource, *, charged: bool = False) -> QueryResult:
        """The answer, of what `source` gives for each of `selections` and parts of them.

        `charged` says that its samples were charged to `budget` when they were read. Raises
        `ExecutionError`, `TooManySamples` or `QueryTimeout`.
        """
        evaluation = Evaluation(self._grid, self._placement, source, self.budget, charged=charged)
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
        for one in series:  # an answer repeats the values of labels that series share in memory
            self.budget.charge(labels_cost(one.labels, 0))
        return QueryResult(
            result_type=result_type,
            series=series,
            at_ms=self._grid.start_ms,
            samples_used=self.budget.samples_used,
        )


def parse_selector(text: str) -> tuple[Matcher, ...]:
    """The matchers of a `match[]` parameter. Raises `ParseError` if it is no plain selector."""
    tree = parse(text)
    if not isinstance(tree, ast.VectorSelector):
        raise ParseError("a series selector is expected", 1, 1)
    if _has_modifiers(tree):
        raise ParseError("offset and @ have no meaning in a series selector", 1, 1)
    check_supported(tree, frozenset(), frozenset())
    try:
        return matchers_of(tree)
    except InvalidInput as error:
        raise bad_expression(text, str(error)) from None


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
    """The samples of each row's only window."""
    rows = windows.rows
    bounds = np.stack((windows.low[:, 0], windows.high[:, 0]), axis=1).tolist()
    return [
        ResultSeries(labels, rows.timestamps[low:high], rows.values[low:high])
        for labels, (low, high) in zip(rows.labels, bounds, strict=True)
        if high > low
    ]
