"""Functions over range vectors, and compensated sums, which add the accumulated rounding error at the end.

Rows are added in pairs, then pairs of pairs, for all groups together, so any number of rows takes only a few
passes over arrays.
"""

from __future__ import annotations

import numpy as np

from penstock.timeseries.model import Floats, Integers, Mask
from penstock.timeseries.promql.vectors import Block, Vectors, Windows


def group_sums(values: Floats, groups: Integers, group_count: int) -> Floats:
    """Return the sum of the rows of each group. Rows without a value must hold 0.

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
        # For infinite or NaN sums the error is meaningless.
        return np.where(np.isfinite(sums), sums + lost, sums)


def group_means(values: Floats, groups: Integers, group_count: int, counts: Floats) -> Floats:
    """Return the mean of each group. `counts` is the number of values of each group at each step."""
    with np.errstate(all="ignore"):
        sums = group_sums(values, groups, group_count)
        means = sums / counts
        if bool((np.isinf(sums) | np.isnan(sums)).any()):
            # The sum of finite values may overflow even if their mean does not, so divide first.
            shares = group_sums(values / counts[groups], groups, group_count)
            means = np.where(np.isfinite(sums), means, shares)
    return means


def column_sums(values: Floats) -> Floats:
    """Return the sum of each column."""
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
    """Return the mean of each column. `counts` is the number of values of each column."""
    with np.errstate(all="ignore"):
        sums = column_sums(values)
        if bool(np.isfinite(sums).all()):
            return sums / counts
        return np.where(np.isfinite(sums), sums / counts, column_sums(values / counts))


def _two_sum(left: Floats, right: Floats) -> tuple[Floats, Floats]:
    """Return the rounded sum and the exact rounding error."""
    total = left + right
    part = total - left
    return total, (left - (total - part)) + (right - part)


def sum_over_time(windows: Windows) -> Vectors:
    """Return the sum of each window."""
    return windows.fold(lambda block: column_sums(block.values))


def avg_over_time(windows: Windows) -> Vectors:
    """Return the mean of each window."""
    return windows.fold(lambda block: column_means(block.values, block.counts))


def min_over_time(windows: Windows) -> Vectors:
    """Return the smallest value of each window, or NaN if all values are NaN."""
    return _reduced(windows, np.fmin)


def max_over_time(windows: Windows) -> Vectors:
    """Return the largest value of each window, or NaN if all values are NaN."""
    return _reduced(windows, np.fmax)


def count_over_time(windows: Windows) -> Vectors:
    """Return the number of samples in each window."""
    return windows.vectors(windows.counts.astype(np.float64), windows.counts >= 1)


def present_over_time(windows: Windows) -> Vectors:
    """Return 1 for each window with a sample."""
    return windows.vectors(np.ones(windows.counts.shape), windows.counts >= 1)


def last_over_time(windows: Windows) -> Vectors:
    """Return the newest sample of each window. The metric's name is kept."""
    return windows.vectors(windows.at(windows.high - 1)[1], windows.counts >= 1, keep_name=True)


def first_over_time(windows: Windows) -> Vectors:
    """Return the oldest sample of each window. The metric's name is kept."""
    return windows.vectors(windows.at(windows.low)[1], windows.counts >= 1, keep_name=True)


def stdvar_over_time(windows: Windows) -> Vectors:
    """Return the population variance of each window."""
    return windows.fold(_variance)


def stddev_over_time(windows: Windows) -> Vectors:
    """Return the population standard deviation of each window."""
    return windows.fold(lambda block: np.sqrt(_variance(block)))


def quantile_over_time(windows: Windows, quantile: Floats) -> Vectors:
    """Return the quantile of each window. `quantile` may differ from step to step."""
    return windows.fold(lambda block: quantiles(block.values, block.inside, quantile[block.steps]))


def mad_over_time(windows: Windows) -> Vectors:
    """Return the median absolute deviation of each window."""

    def deviation(block: Block) -> Floats:
        half = np.full(len(block.counts), 0.5)
        middle = quantiles(block.values, block.inside, half)
        return quantiles(np.abs(block.values - middle), block.inside, half)

    return windows.fold(deviation)


def deriv(windows: Windows) -> Vectors:
    """Return the slope per second of the regression line through the samples."""
    return windows.fold(lambda block: _line(block)[0], count_min=2)


def predict_linear(windows: Windows, ahead_s: Floats) -> Vectors:
    """Return the value of the regression line `ahead_s` seconds after the window's end."""

    def predicted(block: Block) -> Floats:
        slope, at_end = _line(block)
        return at_end + slope * ahead_s[block.steps]

    return windows.fold(predicted, count_min=2)


def quantiles(values: Floats, inside: Mask, quantile: Floats) -> Floats:
    """Return the quantile of the inside values of each column, with linear interpolation.

    NaN counts as smaller than any number. The result is -Inf for a quantile below 0 and +Inf above 1.
    """
    counts = inside.sum(axis=0)
    ordered = np.sort(np.where(inside, values, np.nan), axis=0)  # NaNs and outside values go last
    nans = (inside & np.isnan(values)).sum(axis=0)
    with np.errstate(all="ignore"):
        rank = np.where(np.isnan(quantile), 0.0, np.clip(quantile, 0.0, 1.0)) * np.maximum(counts - 1, 0)
        low = np.floor(rank).astype(np.intp)
        weight = rank - low
        bottom = _ranked(ordered, low, nans)
        top = _ranked(ordered, np.minimum(low + 1, counts - 1), nans)
        between = bottom * (1 - weight) + top * weight
    beyond = np.where(quantile < 0, -np.inf, np.where(quantile > 1, np.inf, np.nan))
    within = (quantile >= 0) & (quantile <= 1)
    return np.where(counts == 0, np.nan, np.where(within, between, beyond))


def _ranked(ordered: Floats, rank: np.typing.NDArray[np.intp], nans: np.typing.NDArray[np.intp]) -> Floats:
    """Return the value at a rank that counts NaNs first, from columns that hold NaNs last."""
    place = np.clip(rank - nans, 0, len(ordered) - 1)
    return np.where(rank < nans, np.nan, np.take_along_axis(ordered, place[None], axis=0)[0])


def _reduced(windows: Windows, ufunc: np.ufunc) -> Vectors:
    values = windows.reduce(ufunc, windows.rows.values, windows.low, windows.high)
    return windows.vectors(values, windows.counts >= 1)


def _variance(block: Block) -> Floats:
    means = column_means(block.values, block.counts)
    distances = np.where(block.inside, block.values - means, 0.0)
    return column_means(distances * distances, block.counts)


def _line(block: Block) -> tuple[Floats, Floats]:
    """Return the slope of the least-squares line and its value at the window's end. A constant has slope
    0."""
    x = np.where(block.inside, block.seconds, 0.0)
    count = block.counts
    middle_x, middle_y = column_means(x, count), column_means(block.values, count)
    away_x = np.where(block.inside, x - middle_x, 0.0)
    away_y = np.where(block.inside, block.values - middle_y, 0.0)
    constant = np.all((block.values == block.values[0]) | ~block.inside, axis=0)
    slope = column_sums(away_x * away_y) / column_sums(away_x * away_x)
    slope = np.where(constant, np.where(np.isfinite(block.values[0]), 0.0, np.nan), slope)
    at_end = np.where(constant, block.values[0], middle_y - slope * middle_x)
    return slope, at_end


def rate(windows: Windows) -> Vectors:
    """Return the increase of a counter per second."""
    return _extrapolated(windows, counter=True, per_second=True)


def increase(windows: Windows) -> Vectors:
    """Return the increase of a counter over the window."""
    return _extrapolated(windows, counter=True, per_second=False)


def delta(windows: Windows) -> Vectors:
    """Return the difference of a gauge over the window."""
    return _extrapolated(windows, counter=False, per_second=False)


def irate(windows: Windows) -> Vectors:
    """Return the increase per second between the last two samples."""
    return _of_the_last_two(windows, counter=True)


def idelta(windows: Windows) -> Vectors:
    """Return the difference between the last two samples."""
    return _of_the_last_two(windows, counter=False)


def resets(windows: Windows) -> Vectors:
    """Return the number of counter resets."""
    values = windows.rows.values
    with np.errstate(invalid="ignore"):
        fell = values[1:] < values[:-1]
    return _counted(windows, fell.astype(np.float64))


def changes(windows: Windows) -> Vectors:
    """Return the number of value changes. NaN followed by NaN is not a change."""
    values = windows.rows.values
    same = (values[1:] == values[:-1]) | (np.isnan(values[1:]) & np.isnan(values[:-1]))
    return _counted(windows, (~same).astype(np.float64))


def _counted(windows: Windows, events: Floats) -> Vectors:
    """Sum events between neighbours. `events[i]` lies between samples `i` and `i + 1`."""
    return windows.vectors(_summed(windows, events), windows.counts >= 1)


def _summed(windows: Windows, events: Floats) -> Floats:
    """Sum events in each window, ignoring those between two series. Return early if there are none."""
    edges = windows.rows.bounds[1:-1] - 1
    events[edges[(edges >= 0) & (edges < len(events))]] = 0.0
    if not events.any():
        return np.zeros(windows.counts.shape)
    return windows.reduce(np.add, events, windows.low, windows.high - 1)


def _extrapolated(windows: Windows, *, counter: bool, per_second: bool) -> Vectors:
    present = windows.counts >= 2
    first_at, first = windows.at(windows.low)
    last_at, last = windows.at(windows.high - 1)
    with np.errstate(all="ignore"):
        change = last - first
        if counter:
            change = change + _summed(windows, _lost_to_resets(windows.rows.values))
        sampled = (last_at - first_at) / 1000.0
        average = sampled / (windows.counts - 1)
        to_start = _reach((first_at - (windows.ends - windows.range_ms)) / 1000.0, average)
        to_end = _reach((windows.ends - last_at) / 1000.0, average)
        if counter:
            to_zero = np.where((change > 0) & (first >= 0), sampled * (first / change), np.inf)
            to_start = np.minimum(to_start, to_zero)
        factor = (sampled + to_start + to_end) / sampled
        if per_second:
            factor = factor / (windows.range_ms / 1000.0)
        return windows.vectors(change * factor, present)


def _reach(gap: Floats, average: Floats) -> Floats:
    """Return how far to extrapolate over the gap between a sample and the window's edge."""
    return np.where(gap >= average * 1.1, average / 2, gap)


def _lost_to_resets(values: Floats) -> Floats:
    return np.where(values[1:] < values[:-1], values[:-1], 0.0)


def _of_the_last_two(windows: Windows, *, counter: bool) -> Vectors:
    present = windows.counts >= 2
    last_at, last = windows.at(windows.high - 1)
    before_at, before = windows.at(windows.high - 2)
    with np.errstate(all="ignore"):
        change = last - before
        if counter:
            change = np.where(last < before, last, change) / ((last_at - before_at) / 1000.0)
    return windows.vectors(change, present)
