"""Syntax trees of queries: their children, the data they select, and checks for unsupported parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

import numpy as np
import promql_parser as ast

from penstock.errors import InvalidInput
from penstock.timeseries.matchers import Matcher, MatchOp
from penstock.timeseries.model import METRIC_NAME, Times
from penstock.timeseries.promql.limits import ParseError, TooManySamples, UnsupportedQuery
from penstock.timeseries.promql.parser import expression_in


@dataclass(frozen=True, slots=True)
class Grid:
    """`count` steps from `start_ms`, `step_ms` apart. An instant query has one step."""

    start_ms: int
    step_ms: int
    count: int

    @property
    def end_ms(self) -> int:
        """Time of the last step."""
        return self.start_ms + (self.count - 1) * self.step_ms

    @property
    def times(self) -> Times:
        return self.start_ms + self.step_ms * np.arange(self.count, dtype=np.int64)


class OutOfRange(InvalidInput):
    """A duration, or a time after `@`, does not fit a timestamp."""


DEPTH_MAX: Final = 200
"""Limit on the depth of trees. They are evaluated recursively; this stays well within Python's limit."""

_MILLISECOND: Final = timedelta(milliseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIME_MAX_MS: Final = 2**53
_OPS: Final = (
    (ast.MatchOp.Equal, MatchOp.EQUAL),
    (ast.MatchOp.NotEqual, MatchOp.NOT_EQUAL),
    (ast.MatchOp.Re, MatchOp.REGEX),
    (ast.MatchOp.NotRe, MatchOp.NOT_REGEX),
)

_Shifted: TypeAlias = ast.VectorSelector | ast.SubqueryExpr


@dataclass(frozen=True, slots=True)
class Selection:
    """The data that a selector reads from storage: all samples with `start_ms <= timestamp <= end_ms`."""

    matchers: tuple[Matcher, ...]
    start_ms: int
    end_ms: int

    def covers(self, other: Selection) -> bool:
        """Return whether this selection includes all of the other."""
        within = self.start_ms <= other.start_ms and other.end_ms <= self.end_ms
        return within and self.matchers == other.matchers


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The times that selectors read: the steps of the whole query, and the engine's defaults."""

    query: Grid
    lookback_ms: int
    subquery_step_ms: int
    steps_max: int

    def times(self, node: _Shifted, grid: Grid) -> Times:
        """Return the time that each step of the grid reads, with `@` and `offset` applied."""
        times = grid.times
        at = node.at
        if at is not None:
            times = np.full_like(times, self._fixed(at))
        return times - milliseconds(node.offset)

    def selection(self, node: ast.VectorSelector, grid: Grid, range_ms: int) -> Selection:
        """Return the selection of `(time - range, time]` for all steps."""
        times = self.times(node, grid)
        return Selection(matchers_of(node), int(times.min()) - range_ms + 1, int(times.max()))

    def inner_grid(self, node: ast.SubqueryExpr, grid: Grid) -> Grid:
        """Return the steps of a subquery. They are multiples of its own step, independent of the query's
        steps.

        Raises `TooManySamples` if there are too many of them.
        """
        step = milliseconds(node.step) or self.subquery_step_ms
        times = self.times(node, grid)
        first = (int(times.min()) - milliseconds(node.range)) // step + 1
        count = int(times.max()) // step - first + 1
        if count > self.steps_max:
            raise TooManySamples(f"a subquery has {count:,} steps, more than {self.steps_max:,}")
        return Grid(first * step, step, max(count, 0))

    def _fixed(self, at: ast.AtModifier) -> int:
        if at.type == ast.AtModifierType.Start:
            return self.query.start_ms
        if at.type == ast.AtModifierType.End:
            return self.query.end_ms
        try:
            moment = at.at
        except (OverflowError, ValueError):
            moment = None
        if moment is None:
            raise OutOfRange("the time after @ is out of range")
        return (moment - _EPOCH) // _MILLISECOND


def milliseconds(duration: timedelta | None) -> int:
    """Return whole milliseconds. Raises `OutOfRange` if they do not fit a timestamp."""
    count = 0 if duration is None else duration // _MILLISECOND
    if abs(count) > _TIME_MAX_MS:
        raise OutOfRange("a duration is out of range")
    return count


def unwrapped(node: ast.Expr) -> ast.Expr:
    """Return the expression without parentheses."""
    while isinstance(node, ast.ParenExpr):
        node = node.expr
    return node


def literal_text(node: ast.Expr) -> str:
    """Return the text of a node that is a string literal, possibly in parentheses."""
    inner = unwrapped(node)
    assert isinstance(inner, ast.StringLiteral)
    return inner.val


def matchers_of(node: ast.VectorSelector) -> tuple[Matcher, ...]:
    """Return all matchers, including the metric's name. Raises `InvalidInput` for an invalid one."""
    named = [Matcher(MatchOp.EQUAL, METRIC_NAME, node.name)] if node.name else []
    return (*named, *(_matcher(matcher) for matcher in node.matchers.matchers))


def children(node: ast.Expr) -> list[ast.Expr]:
    """Return the direct sub-expressions, from left to right."""
    if isinstance(node, ast.BinaryExpr):
        return [node.lhs, node.rhs]
    if isinstance(node, ast.Call):
        return list(node.args)
    if isinstance(node, ast.AggregateExpr):
        return [node.expr] if node.param is None else [node.param, node.expr]
    if isinstance(node, ast.ParenExpr | ast.UnaryExpr | ast.SubqueryExpr):
        return [node.expr]
    return []


def check_supported(tree: ast.Expr, functions: frozenset[str], aggregations: frozenset[str]) -> None:
    """Raise `UnsupportedQuery`, which names the unsupported part, if a query is not supported."""
    waiting = [(tree, 1)]
    while waiting:
        node, depth = waiting.pop()
        if depth > DEPTH_MAX:
            raise ParseError(f"the expression is nested deeper than {DEPTH_MAX}")
        _check_node(node, functions, aggregations)
        waiting += [(child, depth + 1) for child in children(node)]


def selections(node: ast.Expr, grid: Grid, placement: Placement) -> Iterator[Selection]:
    """Yield the selection of each selector in the tree. Subqueries use their own steps."""
    if isinstance(node, ast.MatrixSelector):
        yield placement.selection(node.vector_selector, grid, milliseconds(node.range))
    elif isinstance(node, ast.VectorSelector):
        yield placement.selection(node, grid, placement.lookback_ms)
    else:
        inner = placement.inner_grid(node, grid) if isinstance(node, ast.SubqueryExpr) else grid
        for child in children(node) if inner.count else ():
            yield from selections(child, inner, placement)


def shared_selections(wanted: Iterable[Selection]) -> tuple[Selection, ...]:
    """Return selections that cover `wanted`. Merge those with the same matchers and adjacent times.

    Selections with a gap between them stay separate, because the data in the gap is not needed.
    """
    by_matchers: dict[tuple[Matcher, ...], list[Selection]] = {}
    for one in sorted(wanted, key=lambda one: one.start_ms):
        spans = by_matchers.setdefault(one.matchers, [])
        if spans and one.start_ms <= spans[-1].end_ms + 1:
            spans[-1] = Selection(one.matchers, spans[-1].start_ms, max(one.end_ms, spans[-1].end_ms))
        else:
            spans.append(one)
    return tuple(one for spans in by_matchers.values() for one in spans)


def _check_node(node: ast.Expr, functions: frozenset[str], aggregations: frozenset[str]) -> None:
    if isinstance(node, ast.Call) and node.func.name not in functions:
        raise UnsupportedQuery(f"function {node.func.name!r} is not supported")
    if isinstance(node, ast.AggregateExpr) and str(node.op) not in aggregations:
        raise UnsupportedQuery(f"aggregation {str(node.op)!r} is not supported")
    if isinstance(node, ast.VectorSelector | ast.MatrixSelector):
        selector = node.vector_selector if isinstance(node, ast.MatrixSelector) else node
        if selector.matchers.or_matchers:
            raise UnsupportedQuery("'or' between matchers is not supported")
    if isinstance(node, ast.BinaryExpr) and node.modifier is not None:
        fill = node.modifier.fill_values
        if fill.lhs is not None or fill.rhs is not None:
            raise UnsupportedQuery("modifier 'fill' is not supported")


def _matcher(matcher: ast.Matcher) -> Matcher:
    op = next(own for theirs, own in _OPS if theirs == matcher.op)
    is_expression = op in (MatchOp.REGEX, MatchOp.NOT_REGEX)
    return Matcher(op, matcher.name, expression_in(matcher.value) if is_expression else matcher.value)
