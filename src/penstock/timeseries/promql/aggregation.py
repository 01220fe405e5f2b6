"""Aggregations over the series of a vector, by the labels that are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.timeseries.arrays import Floats, Integers
from penstock.timeseries.float_text import plain_text
from penstock.timeseries.model import METRIC_NAME, Labels
from penstock.timeseries.promql.budget import Budget
from penstock.timeseries.promql.errors import ExecutionError
from penstock.timeseries.promql.label_functions import checked_labels
from penstock.timeseries.promql.over_time import quantiles
from penstock.timeseries.promql.summation import group_means, group_sums
from penstock.timeseries.promql.vectors import Vectors, group_by, rows_by_group

__all__ = ["AGGREGATIONS", "Grouping", "aggregate", "count_values", "quantile", "select_extremes"]

_COUNT_END: Final = 2.0**63


@dataclass(frozen=True, slots=True)
class Grouping:
    """`by` keeps the labels it names; `without` drops them, and the metric's name."""

    by: bool = True
    names: tuple[str, ...] = ()

    def key(self, labels: Labels) -> Labels:
        return labels.keep(self.names) if self.by else labels.drop((METRIC_NAME, *self.names))


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """A vector with the group of each of its rows."""

    vectors: Vectors
    numbers: Integers
    count: int

    @property
    def counts(self) -> Floats:
        """How many values each group has at each step."""
        return self.totals(np.ones(self.vectors.values.shape))

    @property
    def filled(self) -> Floats:
        """The values, 0 where there is none."""
        return np.where(self.vectors.present, self.vectors.values, 0.0)

    def totals(self, values: Floats) -> Floats:
        return group_sums(np.where(self.vectors.present, values, 0.0), self.numbers, self.count)

    def reduced(self, ufunc: np.ufunc) -> Floats:
        """`ufunc` over the values of each group; NaN stands for those that are not there."""
        values = np.where(self.vectors.present, self.vectors.values, np.nan)
        order = np.argsort(self.numbers, kind="stable")
        starts = np.searchsorted(self.numbers[order], np.arange(self.count))
        with np.errstate(invalid="ignore"):
            reduced: Floats = ufunc.reduceat(values[order], starts, axis=0)
        return reduced

    def members(self) -> list[Integers]:
        """The rows of each group."""
        return rows_by_group(self.numbers, self.count)


def _sum(groups: _Groups) -> Floats:
    return group_sums(groups.filled, groups.numbers, groups.count)


def _mean(groups: _Groups) -> Floats:
    return group_means(groups.filled, groups.numbers, groups.count, groups.counts)


def _variance(groups: _Groups) -> Floats:
    with np.errstate(all="ignore"):
        away = groups.vectors.values - _mean(groups)[groups.numbers]
        return groups.totals(away * away) / groups.counts


AGGREGATIONS: Final[dict[str, Callable[[_Groups], Floats]]] = {
    "sum": _sum,
    "avg": _mean,
    "min": lambda groups: groups.reduced(np.fmin),
    "max": lambda groups: groups.reduced(np.fmax),
    "count": lambda groups: groups.counts,
    "group": lambda groups: np.ones((groups.count, groups.vectors.values.shape[1])),
    "stdvar": _variance,
    "stddev": lambda groups: np.sqrt(_variance(groups)),
}


def aggregate(op: str, vectors: Vectors, grouping: Grouping, budget: Budget) -> Vectors:
    """One of `AGGREGATIONS`, per group and step."""
    keys, numbers = _grouped(vectors, grouping, budget)
    if not keys:
        return Vectors.empty(vectors.values.shape[1])
    groups = _Groups(vectors, numbers, len(keys))
    return Vectors(keys, AGGREGATIONS[op](groups), groups.counts > 0)


def quantile(vectors: Vectors, grouping: Grouping, which: Floats, budget: Budget) -> Vectors:
    """The quantile of each group, which may differ from step to step."""
    keys, numbers = _grouped(vectors, grouping, budget)
    steps = vectors.values.shape[1]
    values, present = np.zeros((len(keys), steps)), np.zeros((len(keys), steps), np.bool_)
    for group, rows in enumerate(_Groups(vectors, numbers, len(keys)).members()):
        budget.check()
        inside = vectors.present[rows]
        values[group] = quantiles(vectors.values[rows], inside, which)
        present[group] = inside.any(axis=0)
    return Vectors(keys, values, present)


def select_extremes(
    vectors: Vectors, grouping: Grouping, how_many: Floats, budget: Budget, *, largest: bool
) -> Vectors:
    """The `how_many` largest or smallest of each group at each step, as they are.

    NaN comes last either way; of equal values the one whose labels sort first is taken. For one step
    the rows come in the order of their values. Raises `ExecutionError` if the number fits no 64-bit integer.
    """
    if not bool((np.abs(how_many) < _COUNT_END).all()):  # NaN is not smaller than anything
        raise ExecutionError("the number of series to select is NaN or beyond 64-bit integers")
    limit = np.clip(np.trunc(how_many), 0, len(vectors.labels)).astype(np.intp)
    keys, numbers = _grouped(vectors, grouping, budget)
    chosen = np.zeros(vectors.present.shape, np.bool_)
    ranking: list[Integers] = []
    for rows in _Groups(vectors, numbers, len(keys)).members():
        budget.check()
        values, present = vectors.values[rows], vectors.present[rows]
        sortable = np.where(np.isnan(values), np.inf, -values if largest else values)
        missing = np.where(present, np.isnan(values), 2)
        order = np.lexsort((sortable, missing), axis=0)
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(len(rows))[:, None], axis=0)
        chosen[rows] = present & (rank < limit)
        ranking.append(rows[order[:, 0]])
    selected = Vectors(vectors.labels, vectors.values, chosen)
    if vectors.values.shape[1] == 1 and ranking:
        selected = selected.rows(np.concatenate(ranking))
    return selected.compact()


def count_values(vectors: Vectors, grouping: Grouping, label: str, budget: Budget) -> Vectors:
    """How many series of each group have each value, which becomes the label.

    Raises `ExecutionError` if the label has no name or could not be stored, and as `Budget.charge` does:
    every value is a series.
    """
    if not label:
        raise ExecutionError("the name of the label of count_values() is empty")
    row, step = np.nonzero(vectors.present)
    distinct, which = _distinct(vectors.values[row, step])
    keys, numbers = _grouped(vectors, grouping, budget)
    cells, cell = np.unique(numbers[row] * len(distinct) + which, return_inverse=True)
    budget.charge(len(cells) * vectors.values.shape[1])
    pairs = zip(*(part.tolist() for part in np.divmod(cells, max(len(distinct), 1))), strict=True)
    # The label may be one that was grouped by: then groups become one where the value is the same.
    made = (keys[group].replace(label, plain_text(float(distinct[value]))) for group, value in pairs)
    checked = (checked_labels(one, "count_values()") for one in made)
    labels, place = group_by(list(budget.charge_labels(checked)))
    counts = np.zeros((len(labels), vectors.values.shape[1]))
    np.add.at(counts, (place[cell], step), 1.0)
    return Vectors(labels, counts, counts > 0)


def _grouped(vectors: Vectors, grouping: Grouping, budget: Budget) -> tuple[list[Labels], Integers]:
    """The groups of a vector, and the group of each row."""
    return group_by([grouping.key(labels) for labels in budget.watch(vectors.labels)])


def _distinct(values: Floats) -> tuple[Floats, Integers]:
    """The values that differ as texts, and which of them each is: -0 is not 0, and every NaN is the same."""
    bits, which = np.unique(np.where(np.isnan(values), np.nan, values).view(np.uint64), return_inverse=True)
    return bits.view(np.float64), which
