"""Evaluation of a query's syntax tree at every step, over the series of a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
import promql_parser as ast

from penstock.timeseries.matchers import Matcher, select_labels
from penstock.timeseries.model import Floats, Labels, Samples, Series, Times
from penstock.timeseries.promql import aggregation, binary
from penstock.timeseries.promql.binary import SET_OPERATORS
from penstock.timeseries.promql.limits import Budget
from penstock.timeseries.promql.tree import Grid, Placement, Selection, literal_text, milliseconds, unwrapped
from penstock.timeseries.promql.vectors import Rows, Scalars, Text, Value, Vectors, Windows, latest

SelectedSeries: TypeAlias = tuple[Labels, Times, Floats]
"""Labels, strictly increasing timestamps, and their values."""


class SeriesSource(Protocol):
    """Source of series for selectors. Called on the evaluating thread, possibly twice for one selector."""

    def select(self, matchers: Sequence[Matcher], start_ms: int, end_ms: int) -> list[SelectedSeries]:
        """Return every series that satisfies all matchers, with its samples in `[start_ms, end_ms]`.

        Each label set occurs once. Stale markers are included.
        """
        ...


@dataclass(frozen=True, slots=True)
class FetchedSource:
    """Series that were read in advance, by selection, because reading the storage is asynchronous.

    A selection serves every selection that it covers.
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
    """Return the samples within the times, as views. Omit series without any."""
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
        self,
        grid: Grid,
        placement: Placement,
        source: SeriesSource,
        budget: Budget,
        call: FunctionCall,
        *,
        charged: bool,
    ) -> None:
        """Evaluate functions with `call`. Pass `charged` if the samples of `source` are already charged."""
        self.grid = grid
        self.budget = budget
        self._call = call
        self._placement = placement
        self._source = source
        self._charged = charged

    def value(self, node: ast.Expr) -> Value:
        """Return the value of a node. Raises `ExecutionError`, `TooManySamples` or `QueryTimeout`."""
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
        return self._call(self, node.func.name, list(node.args))

    def vectors(self, node: ast.Expr) -> Vectors:
        """Return the value of a node that the parser has verified to be a vector."""
        value = self.value(node)
        assert isinstance(value, Vectors)
        return value

    def scalars(self, node: ast.Expr) -> Scalars:
        """Return the value of a node that the parser has verified to be a number."""
        value = self.value(node)
        assert isinstance(value, Scalars)
        return value

    def latest(self, node: ast.VectorSelector) -> tuple[Vectors, Times]:
        """Return the newest sample of each series within the lookback, and its timestamp."""
        lookback_ms = self._placement.lookback_ms
        rows = self._rows(node, lookback_ms)
        self.budget.charge(len(rows.labels) * self.grid.count)
        return latest(rows, self._placement.times(node, self.grid), lookback_ms)

    def windows(self, node: ast.Expr) -> Windows:
        """Return the samples in the window of each step."""
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
        """Evaluate the inner expression at its own steps. Each value becomes a sample."""
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
        return Evaluation(grid, self._placement, self._source, self.budget, self._call, charged=self._charged)

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


FunctionCall: TypeAlias = Callable[[Evaluation, str, list[ast.Expr]], Value]
"""Callable that evaluates a function by name over its arguments."""


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
