"""Aggregations over the series of a vector, grouped by labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.timeseries.model import METRIC_NAME, Floats, Integers, Labels, Mask, plain_text
from penstock.timeseries.promql.limits import Budget, ExecutionError
from penstock.timeseries.promql.range_functions import group_means, group_sums, quantiles
from penstock.timeseries.promql.vectors import Vectors, checked_labels, group_by, merged, rows_by_group

BUCKET_LABEL: Final = "le"
_TOLERANCE: Final = 1e-12
"""Relative difference below which counts are equal. Sums of floats differ where sums of integers would
not."""
_SMALLEST_NORMAL: Final = float(np.finfo(np.float64).tiny)


def histogram_quantile(quantile: Floats, buckets: Vectors, budget: Budget) -> Vectors:
    """Return the quantile of each histogram at each step, interpolated linearly within its bucket.

    Series whose `le` is not a number are ignored. The quantile is NaN without a bucket up to +Inf, with fewer
    than two buckets, or for an empty histogram. A quantile in the last bucket is the lower bound of that
    bucket. Raises `ExecutionError` if two metrics have a histogram with the same labels.
    """
    bounds = [_bound(labels.value(BUCKET_LABEL)) for labels in buckets.labels]
    usable = [row for row, bound in enumerate(bounds) if bound is not None]
    chosen = buckets.rows(usable)
    upper = np.array([bounds[row] for row in usable], np.float64)
    keys, groups = group_by([labels.drop((BUCKET_LABEL,)) for labels in budget.watch(chosen.labels)])
    steps = buckets.values.shape[1]
    values, present = np.zeros((len(keys), steps)), np.zeros((len(keys), steps), np.bool_)
    for group, rows in enumerate(rows_by_group(groups, len(keys))):
        budget.check()
        rows = rows[np.argsort(upper[rows], kind="stable")]
        inside = chosen.present[rows]
        values[group] = _quantiles(quantile, upper[rows], chosen.values[rows], inside)
        present[group] = inside.any(axis=0)
    return merged([key.without_name() for key in keys], values, present).compact()


def _bound(text: str) -> float | None:
    try:
        return None if "_" in text or text != text.strip() else float(text)
    except ValueError:
        return None


def _quantiles(quantile: Floats, upper: Floats, counts: Floats, inside: Mask) -> Floats:
    """Return the quantiles. Steps with the same buckets are computed together."""
    answer = np.full(len(quantile), np.nan)
    patterns, which = np.unique(inside, axis=1, return_inverse=True)
    steps_by_pattern = rows_by_group(which.ravel(), patterns.shape[1])
    for pattern, steps in zip(patterns.T, steps_by_pattern, strict=True):
        there = np.flatnonzero(pattern)
        if len(there) and upper[there[-1]] == np.inf:
            bounds, totals = _joined(upper[there], counts[np.ix_(there, steps)])
            answer[steps] = _interpolated(quantile[steps], bounds, totals)
    beyond = np.where(quantile < 0, -np.inf, np.where(quantile > 1, np.inf, answer))
    return np.where(np.isnan(quantile), np.nan, beyond)


def _joined(upper: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Merge buckets with the same bound."""
    bounds, first = np.unique(upper, return_index=True)
    return bounds, np.add.reduceat(counts, first, axis=0)


def _interpolated(quantile: Floats, upper: Floats, counts: Floats) -> Floats:
    if len(upper) < 2:
        return np.full(len(quantile), np.nan)
    counts = _rising(counts)
    total = counts[-1]
    with np.errstate(all="ignore"):
        rank = quantile * total
        bucket = np.argmax(counts >= rank, axis=0)
        step = np.arange(len(quantile))
        below = np.where(bucket > 0, counts[bucket - 1, step], 0.0)
        start = np.where(bucket > 0, upper[bucket - 1], 0.0)
        end = upper[bucket]
        share = (rank - below) / (counts[bucket, step] - below)
        between = start + (end - start) * share
    between = np.where((bucket == 0) & (upper[0] <= 0), upper[0], between)
    between = np.where(bucket == len(upper) - 1, upper[-2], between)
    return np.where((total == 0) | np.isnan(total), np.nan, between)


def _rising(counts: Floats) -> Floats:
    """Return counts that never decrease from one bucket to the next, as buckets read at different times
    may."""
    rising = counts.copy()
    for bucket in range(1, len(rising)):
        before, own = rising[bucket - 1], rising[bucket]
        rising[bucket] = np.where((own < before) | _nearly_equal(before, own), before, own)
    return rising


def _nearly_equal(left: Floats, right: Floats) -> Mask:
    size = np.abs(left) + np.abs(right)
    apart = np.abs(left - right)
    tiny = (left == 0) | (right == 0) | (size < _SMALLEST_NORMAL)
    with np.errstate(all="ignore"):
        near = apart / size < _TOLERANCE
    close: Mask = (left == right) | np.where(tiny, apart < _TOLERANCE * _SMALLEST_NORMAL, near)
    return close


_COUNT_END: Final = 2.0**63


@dataclass(frozen=True, slots=True)
class Grouping:
    """The grouping modifier. `by` keeps the named labels; `without` drops them and the metric's name."""

    by: bool = True
    names: tuple[str, ...] = ()

    def key(self, labels: Labels) -> Labels:
        return labels.keep(self.names) if self.by else labels.drop((METRIC_NAME, *self.names))


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """A vector with the group number of each row."""

    vectors: Vectors
    numbers: Integers
    count: int

    @property
    def counts(self) -> Floats:
        """Number of values of each group at each step."""
        return self.totals(np.ones(self.vectors.values.shape))

    @property
    def filled(self) -> Floats:
        """The values, with 0 where there is none."""
        return np.where(self.vectors.present, self.vectors.values, 0.0)

    def totals(self, values: Floats) -> Floats:
        return group_sums(np.where(self.vectors.present, values, 0.0), self.numbers, self.count)

    def reduced(self, ufunc: np.ufunc) -> Floats:
        """Apply `ufunc` to the values of each group, with NaN for missing ones."""
        values = np.where(self.vectors.present, self.vectors.values, np.nan)
        order = np.argsort(self.numbers, kind="stable")
        starts = np.searchsorted(self.numbers[order], np.arange(self.count))
        with np.errstate(invalid="ignore"):
            reduced: Floats = ufunc.reduceat(values[order], starts, axis=0)
        return reduced

    def members(self) -> list[Integers]:
        """Return the rows of each group."""
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
    """Apply one of `AGGREGATIONS` to each group and step."""
    keys, numbers = _grouped(vectors, grouping, budget)
    if not keys:
        return Vectors.empty(vectors.values.shape[1])
    groups = _Groups(vectors, numbers, len(keys))
    return Vectors(keys, AGGREGATIONS[op](groups), groups.counts > 0)


def quantile(vectors: Vectors, grouping: Grouping, which: Floats, budget: Budget) -> Vectors:
    """Return the quantile of each group. `which` may differ from step to step."""
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
    """Return the `how_many` largest or smallest series of each group at each step, unchanged.

    NaN always comes last. Of equal values, the one whose labels sort first is taken. For a single step, rows
    are ordered by value. Raises `ExecutionError` if the number does not fit a 64-bit integer.
    """
    if not bool((np.abs(how_many) < _COUNT_END).all()):  # also true for NaN
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
    """Count the series of each group with each value, which becomes a label.

    Raises `ExecutionError` if the label has no name or could not be stored. Also raises the errors of
    `Budget.charge`, because every value is a series.
    """
    if not label:
        raise ExecutionError("the name of the label of count_values() is empty")
    row, step = np.nonzero(vectors.present)
    distinct, which = _distinct(vectors.values[row, step])
    keys, numbers = _grouped(vectors, grouping, budget)
    cells, cell = np.unique(numbers[row] * len(distinct) + which, return_inverse=True)
    budget.charge(len(cells) * vectors.values.shape[1])
    pairs = zip(*(part.tolist() for part in np.divmod(cells, max(len(distinct), 1))), strict=True)
    # If the label is a grouping label, groups with the same value are merged.
    made = (keys[group].replace(label, plain_text(float(distinct[value]))) for group, value in pairs)
    checked = (checked_labels(one, "count_values()") for one in made)
    labels, place = group_by(list(budget.charge_labels(checked)))
    counts = np.zeros((len(labels), vectors.values.shape[1]))
    np.add.at(counts, (place[cell], step), 1.0)
    return Vectors(labels, counts, counts > 0)


def _grouped(vectors: Vectors, grouping: Grouping, budget: Budget) -> tuple[list[Labels], Integers]:
    """Return the groups of a vector, and the group of each row."""
    return group_by([grouping.key(labels) for labels in budget.watch(vectors.labels)])


def _distinct(values: Floats) -> tuple[Floats, Integers]:
    """Return the values with distinct texts, and the index of each. -0 differs from 0, and all NaNs are
    equal."""
    bits, which = np.unique(np.where(np.isnan(values), np.nan, values).view(np.uint64), return_inverse=True)
    return bits.view(np.float64), which
