"""Functions of how a range changes: rate, increase, delta and their kin.

A counter that falls has been reset: what it lost is added back. The change seen between the first and
the last sample is extended to the window's edges if samples come close enough to them, at most by half
the average distance between samples if they do not, and never to where a counter would be negative.
"""

from __future__ import annotations

import numpy as np

from penstock.timeseries.arrays import Floats
from penstock.timeseries.promql.vectors import Vectors
from penstock.timeseries.promql.windows import Windows

__all__ = ["changes", "delta", "idelta", "increase", "irate", "rate", "resets"]


def rate(windows: Windows) -> Vectors:
    """The increase of a counter per second."""
    return _extrapolated(windows, counter=True, per_second=True)


def increase(windows: Windows) -> Vectors:
    """The increase of a counter over the window."""
    return _extrapolated(windows, counter=True, per_second=False)


def delta(windows: Windows) -> Vectors:
    """The difference of a gauge over the window."""
    return _extrapolated(windows, counter=False, per_second=False)


def irate(windows: Windows) -> Vectors:
    """The increase per second between the last two samples."""
    return _of_the_last_two(windows, counter=True)


def idelta(windows: Windows) -> Vectors:
    """The difference between the last two samples."""
    return _of_the_last_two(windows, counter=False)


def resets(windows: Windows) -> Vectors:
    """How often a counter fell."""
    values = windows.rows.values
    with np.errstate(invalid="ignore"):
        fell = values[1:] < values[:-1]
    return _counted(windows, fell.astype(np.float64))


def changes(windows: Windows) -> Vectors:
    """How often the value changed; from NaN to NaN is no change."""
    values = windows.rows.values
    same = (values[1:] == values[:-1]) | (np.isnan(values[1:]) & np.isnan(values[:-1]))
    return _counted(windows, (~same).astype(np.float64))


def _counted(windows: Windows, events: Floats) -> Vectors:
    """Events between neighbours, of which `events[i]` lies between samples `i` and `i + 1`."""
    return windows.vectors(_summed(windows, events), windows.counts >= 1)


def _summed(windows: Windows, events: Floats) -> Floats:
    """Most counters are never reset, and what lies between two series is no event of either."""
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
    """How far the change is extended over a gap between a sample and the window's edge."""
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
