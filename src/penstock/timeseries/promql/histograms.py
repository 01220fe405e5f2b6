"""Quantiles of histograms: series that count what is at most `le`."""

from __future__ import annotations

from typing import Final

import numpy as np

from penstock.timeseries.arrays import Floats, Mask
from penstock.timeseries.promql.budget import Budget
from penstock.timeseries.promql.vectors import Vectors, group_by, merged, rows_by_group

__all__ = ["BUCKET_LABEL", "histogram_quantile"]

BUCKET_LABEL: Final = "le"
_TOLERANCE: Final = 1e-12
"""Counts this close are taken as equal: floats that were added up differ where whole numbers would not."""
_SMALLEST_NORMAL: Final = float(np.finfo(np.float64).tiny)


def histogram_quantile(quantile: Floats, buckets: Vectors, budget: Budget) -> Vectors:
    """The quantile of each histogram at each step, evenly spread within the bucket it falls into.

    Series without a number in `le` take no part. Without a bucket up to +Inf, with fewer than two
    buckets or with nothing counted, the quantile is NaN. A quantile in the last bucket is the bound
    before it. Raises `ExecutionError` if two metrics have a histogram of the same labels.
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
    """Steps at which the same buckets are there are worked out together."""
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
    """Buckets of one bound as one."""
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
    """Counts that never fall from one bucket to the next; reading them at different times may do that."""
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
