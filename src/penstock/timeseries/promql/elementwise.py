"""Functions of each value by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.timeseries.arrays import Floats, Times
from penstock.timeseries.promql.vectors import Vectors

__all__ = ["CALENDAR", "ELEMENTWISE", "clamp", "clamp_max", "clamp_min", "round_to"]

_DAY_S: Final = 86400


def _sign(values: Floats) -> Floats:
    return np.where(values < 0, -1.0, np.where(values > 0, 1.0, values))


ELEMENTWISE: Final[dict[str, Callable[[Floats], Floats]]] = {
    "abs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "ceil": np.ceil,
    "cos": np.cos,
    "cosh": np.cosh,
    "deg": np.rad2deg,
    "exp": np.exp,
    "floor": np.floor,
    "ln": np.log,
    "log10": np.log10,
    "log2": np.log2,
    "rad": np.deg2rad,
    "sgn": _sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
}


def round_to(vectors: Vectors, nearest: Floats) -> Vectors:
    """To the nearest multiple, halves upwards."""
    with np.errstate(all="ignore"):
        inverse = 1.0 / nearest
        return vectors.with_values(np.floor(vectors.values * inverse + 0.5) / inverse)


def clamp(vectors: Vectors, low: Floats, high: Floats) -> Vectors:
    """Between both bounds; nothing at steps where they are the wrong way round."""
    with np.errstate(invalid="ignore"):
        allowed = vectors.where(np.broadcast_to(~(high < low), vectors.present.shape))
        return allowed.with_values(np.maximum(low, np.minimum(high, allowed.values)))


def clamp_min(vectors: Vectors, low: Floats) -> Vectors:
    """At least the bound."""
    return vectors.with_values(np.maximum(vectors.values, low))


def clamp_max(vectors: Vectors, high: Floats) -> Vectors:
    """At most the bound."""
    return vectors.with_values(np.minimum(vectors.values, high))


def _of_calendar(part: Callable[[Times], Times]) -> Callable[[Floats], Floats]:
    """A part of the UTC date of seconds since the Unix epoch; NaN where there is no such date."""

    def function(values: Floats) -> Floats:
        known = np.isfinite(values) & (np.abs(values) < 2**43)
        return np.where(known, part(np.where(known, values, 0).astype(np.int64)), np.nan)

    return function


def _month_start(seconds: Times) -> npt.NDArray[np.datetime64]:
    return seconds.astype("M8[s]").astype("M8[M]")


def _days_between(first: npt.NDArray[np.datetime64], last: npt.NDArray[np.datetime64]) -> Times:
    days: Times = (last.astype("M8[D]") - first.astype("M8[D]")).astype(np.int64)
    return days


def _day_of_month(seconds: Times) -> Times:
    return _days_between(_month_start(seconds), seconds.astype("M8[s]")) + 1


def _day_of_year(seconds: Times) -> Times:
    dates = seconds.astype("M8[s]")
    return _days_between(dates.astype("M8[Y]"), dates) + 1


def _days_in_month(seconds: Times) -> Times:
    start = _month_start(seconds)
    return _days_between(start, start + 1)


CALENDAR: Final[dict[str, Callable[[Floats], Floats]]] = {
    "day_of_month": _of_calendar(_day_of_month),
    "day_of_week": _of_calendar(lambda seconds: (seconds // _DAY_S + 4) % 7),  # the epoch was a Thursday
    "day_of_year": _of_calendar(_day_of_year),
    "days_in_month": _of_calendar(_days_in_month),
    "hour": _of_calendar(lambda seconds: seconds // 3600 % 24),
    "minute": _of_calendar(lambda seconds: seconds // 60 % 60),
    "month": _of_calendar(lambda seconds: _month_start(seconds).astype(np.int64) % 12 + 1),
    "year": _of_calendar(lambda seconds: seconds.astype("M8[s]").astype("M8[Y]").astype(np.int64) + 1970),
}
