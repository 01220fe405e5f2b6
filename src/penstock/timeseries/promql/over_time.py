"""Functions that fold a range into one value: the `_over_time` family, and straight lines through it."""

from __future__ import annotations

import numpy as np

from penstock.timeseries.arrays import Floats, Mask
from penstock.timeseries.promql.summation import column_means, column_sums
from penstock.timeseries.promql.vectors import Vectors
from penstock.timeseries.promql.windows import Block, Windows

__all__ = [
    "avg_over_time",
    "count_over_time",
    "deriv",
    "first_over_time",
    "last_over_time",
    "mad_over_time",
    "max_over_time",
    "min_over_time",
    "predict_linear",
    "present_over_time",
    "quantile_over_time",
    "quantiles",
    "stddev_over_time",
    "stdvar_over_time",
    "sum_over_time",
]


def sum_over_time(windows: Windows) -> Vectors:
    """The sum, with what rounding loses added back."""
    return windows.fold(lambda block: column_sums(block.values))


def avg_over_time(windows: Windows) -> Vectors:
    """The mean."""
    return windows.fold(lambda block: column_means(block.values, block.counts))


def min_over_time(windows: Windows) -> Vectors:
    """The smallest value; NaN only where all are."""
    return _reduced(windows, np.fmin)


def max_over_time(windows: Windows) -> Vectors:
    """The largest value; NaN only where all are."""
    return _reduced(windows, np.fmax)


def count_over_time(windows: Windows) -> Vectors:
    """How many samples there are."""
    return windows.vectors(windows.counts.astype(np.float64), windows.counts >= 1)


def present_over_time(windows: Windows) -> Vectors:
    """1 where there is a sample."""
    return windows.vectors(np.ones(windows.counts.shape), windows.counts >= 1)


def last_over_time(windows: Windows) -> Vectors:
    """The newest sample; it keeps the metric's name."""
    return windows.vectors(windows.at(windows.high - 1)[1], windows.counts >= 1, keep_name=True)


def first_over_time(windows: Windows) -> Vectors:
    """The oldest sample; it keeps the metric's name."""
    return windows.vectors(windows.at(windows.low)[1], windows.counts >= 1, keep_name=True)


def stdvar_over_time(windows: Windows) -> Vectors:
    """The population variance."""
    return windows.fold(_variance)


def stddev_over_time(windows: Windows) -> Vectors:
    """The population standard deviation."""
    return windows.fold(lambda block: np.sqrt(_variance(block)))


def quantile_over_time(windows: Windows, quantile: Floats) -> Vectors:
    """The quantile of each window, which may differ from step to step."""
    return windows.fold(lambda block: quantiles(block.values, block.inside, quantile[block.steps]))


def mad_over_time(windows: Windows) -> Vectors:
    """The median of the distances from the median."""

    def deviation(block: Block) -> Floats:
        half = np.full(len(block.counts), 0.5)
        middle = quantiles(block.values, block.inside, half)
        return quantiles(np.abs(block.values - middle), block.inside, half)

    return windows.fold(deviation)


def deriv(windows: Windows) -> Vectors:
    """The slope per second of the straight line through the samples."""
    return windows.fold(lambda block: _line(block)[0], count_min=2)


def predict_linear(windows: Windows, ahead_s: Floats) -> Vectors:
    """Where that line is `ahead_s` seconds after the window's end."""

    def predicted(block: Block) -> Floats:
        slope, at_end = _line(block)
        return at_end + slope * ahead_s[block.steps]

    return windows.fold(predicted, count_min=2)


def quantiles(values: Floats, inside: Mask, quantile: Floats) -> Floats:
    """The quantile of each column's inside values, between neighbours by their distance.

    NaN counts as smaller than anything. A quantile below 0 is -Inf, above 1 +Inf.
    """
    counts = inside.sum(axis=0)
    ordered = np.sort(np.where(inside, values, np.nan), axis=0)  # NaNs, and what is outside, go last
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
    """The value of that rank when NaNs stand first, of columns where they stand last."""
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
    """Slope and value at the window's end of the least-squares line; a constant has slope 0."""
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
