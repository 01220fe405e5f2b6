"""Sums that keep what rounding loses: each addition's error is carried along and added at the end.

Rows are added in pairs, then pairs of pairs, all groups at once, so that the work is a few passes over
arrays however many rows there are.
"""

from __future__ import annotations

import numpy as np

from penstock.timeseries.arrays import Floats, Integers

__all__ = ["column_means", "column_sums", "group_means", "group_sums"]


def group_sums(values: Floats, groups: Integers, group_count: int) -> Floats:
    """The sum of the rows of each group; rows that have no value are expected to hold 0.

    Every group must have a row.
    """
    counts = np.bincount(groups, minlength=group_count)
    sums = values[np.argsort(groups, kind="stable")]
    lost = np.zeros_like(sums)
    with np.errstate(all="ignore"):
        while int(counts.max(initial=0)) > 1:
            starts = np.cumsum(counts) - counts
            rank = np.arange(len(sums)) - np.repeat(starts, counts)
            left = np.flatnonzero(rank % 2 == 0)
            paired = (rank[left] + 1 < np.repeat(counts, (counts + 1) // 2))[:, None]
            right = np.minimum(left + 1, len(sums) - 1)
            sums, error = _two_sum(sums[left], np.where(paired, sums[right], 0.0))
            lost = lost[left] + np.where(paired, lost[right], 0.0) + error
            counts = (counts + 1) // 2
        # Beyond the finite numbers the error is meaningless.
        return np.where(np.isfinite(sums), sums + lost, sums)


def group_means(values: Floats, groups: Integers, group_count: int, counts: Floats) -> Floats:
    """The mean of each group, `counts` being how many values each has at each step."""
    with np.errstate(all="ignore"):
        sums = group_sums(values, groups, group_count)
        means = sums / counts
        if bool((np.isinf(sums) | np.isnan(sums)).any()):
            # A sum of finite values may overflow where their mean does not: divide first.
            shares = group_sums(values / counts[groups], groups, group_count)
            means = np.where(np.isfinite(sums), means, shares)
    return means


def column_sums(values: Floats) -> Floats:
    """The sum of each column."""
    sums, lost = values, np.zeros(values.shape[1])
    with np.errstate(all="ignore"):
        while len(sums) > 1:
            paired = len(sums) // 2 * 2
            odd = sums[paired:]
            sums, error = _two_sum(sums[:paired:2], sums[1:paired:2])
            lost = lost + error.sum(axis=0)
            sums = np.concatenate((sums, odd)) if len(odd) else sums
        total: Floats = sums[0]
        return np.where(np.isfinite(total), total + lost, total)


def column_means(values: Floats, counts: Floats) -> Floats:
    """The mean of each column, which has `counts` values."""
    with np.errstate(all="ignore"):
        sums = column_sums(values)
        if bool(np.isfinite(sums).all()):
            return sums / counts
        return np.where(np.isfinite(sums), sums / counts, column_sums(values / counts))


def _two_sum(left: Floats, right: Floats) -> tuple[Floats, Floats]:
    """The rounded sum and exactly what the rounding lost."""
    total = left + right
    part = total - left
    return total, (left - (total - part)) + (right - part)
