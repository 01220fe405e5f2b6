"""PromQL functions by name, applied to their arguments at every step."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import promql_parser as ast

from penstock.errors import InvalidInput, LimitExceeded
from penstock.timeseries.matchers import Matcher, MatchOp, Pattern, pieces
from penstock.timeseries.model import (
    LABEL_BYTES_MAX,
    METRIC_NAME,
    NO_LABELS,
    Floats,
    Labels,
    Mask,
    Times,
)
from penstock.timeseries.promql import range_functions
from penstock.timeseries.promql.aggregation import histogram_quantile
from penstock.timeseries.promql.evaluation import Evaluation
from penstock.timeseries.promql.limits import Budget, ExecutionError
from penstock.timeseries.promql.tree import literal_text, matchers_of, unwrapped
from penstock.timeseries.promql.vectors import (
    SHORTEN,
    Scalars,
    Value,
    Vectors,
    Windows,
    checked_labels,
    merged,
)

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
    """Round to the nearest multiple, halves upwards."""
    with np.errstate(all="ignore"):
        inverse = 1.0 / nearest
        return vectors.with_values(np.floor(vectors.values * inverse + 0.5) / inverse)


def clamp(vectors: Vectors, low: Floats, high: Floats) -> Vectors:
    """Limit to both bounds. Return no value at steps where `high` is below `low`."""
    with np.errstate(invalid="ignore"):
        allowed = vectors.where(np.broadcast_to(~(high < low), vectors.present.shape))
        return allowed.with_values(np.maximum(low, np.minimum(high, allowed.values)))


def clamp_min(vectors: Vectors, low: Floats) -> Vectors:
    """Limit to values of at least `low`."""
    return vectors.with_values(np.maximum(vectors.values, low))


def clamp_max(vectors: Vectors, high: Floats) -> Vectors:
    """Limit to values of at most `high`."""
    return vectors.with_values(np.minimum(vectors.values, high))


def _of_calendar(part: Callable[[Times], Times]) -> Callable[[Floats], Floats]:
    """Return a function that extracts a part of the UTC date, with NaN for times out of range."""

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


_RUN: Final = re.compile(r"[0-9]+|[^0-9]+")


def label_replace(
    vectors: Vectors, into: str, template: str, source: str, expression: str, budget: Budget
) -> Vectors:
    """Set label `into` to the filled template where the whole label `source` matches.

    Raises `ExecutionError` if the expression or the label's name is invalid, if two series get the same
    labels, and before it creates a label that is too long to be stored. Also raises the errors of
    `Budget.charge`.
    """
    _check_name(into)
    try:
        pattern = Pattern(expression)
    except InvalidInput as error:
        raise ExecutionError(f"invalid regular expression in label_replace(): {error}") from None
    labels: list[Labels] = []
    for piece in pieces([own.value(source) for own in vectors.labels]):
        budget.check()
        try:
            expanded = pattern.expand(piece, template)
        except LimitExceeded as error:
            raise ExecutionError(
                f"label_replace() makes label {into[:80]!r} too long: {error}. {SHORTEN}"
            ) from None
        for value in expanded:
            own = vectors.labels[len(labels)]
            if value is None:
                labels.append(own)
            else:
                labels += budget.charge_labels([checked_labels(own.replace(into, value), "label_replace()")])
    return merged(labels, vectors.values, vectors.present)


def label_join(
    vectors: Vectors, into: str, separator: str, sources: Sequence[str], budget: Budget
) -> Vectors:
    """Set label `into` to the joined values of `sources`. Raises the same errors as `label_replace`."""
    _check_name(into)

    def joined(own: Labels) -> Labels:
        values = [own.value(source) for source in sources]
        size = sum(map(len, values)) + len(separator) * max(0, len(values) - 1)
        if size > LABEL_BYTES_MAX:
            raise ExecutionError(
                f"label_join() makes label {into[:80]!r} too long: {size:,} characters; "
                f"at most {LABEL_BYTES_MAX:,} are allowed. {SHORTEN}"
            )
        return checked_labels(own.replace(into, separator.join(values)), "label_join()")

    labels = list(budget.charge_labels(map(joined, vectors.labels)))
    return merged(labels, vectors.values, vectors.present)


def absence(present: Mask, labels: Labels) -> Vectors:
    """Return 1, with `labels`, at the steps at which no row has a value."""
    absent: Mask = np.logical_not(np.any(present, axis=0))
    return Vectors([labels], np.ones((1, len(absent))), absent[None]).compact()


def absent_labels(matchers: Sequence[Matcher]) -> Labels:
    """Return the known labels of an absent series: those with a single matcher that tests equality."""
    names = Counter(matcher.name for matcher in matchers)
    return Labels.of(
        (matcher.name, matcher.value)
        for matcher in matchers
        if matcher.op is MatchOp.EQUAL and names[matcher.name] == 1 and matcher.name != METRIC_NAME
    )


def sort_by_value(vectors: Vectors, *, descending: bool) -> Vectors:
    """Sort rows by value, NaN last. Range queries have no order of rows, so they are unchanged."""
    if vectors.values.shape[1] != 1:
        return vectors
    values = vectors.values[:, 0]
    return vectors.rows(np.lexsort((-values if descending else values, np.isnan(values))))


def sort_by_label(vectors: Vectors, names: Sequence[str], budget: Budget, *, descending: bool) -> Vectors:
    """Sort rows by the values of labels, with digits in them compared as numbers, then by all labels.

    Every part of a key is charged. Raises the errors of `Budget.charge`.
    """
    if vectors.values.shape[1] != 1:
        return vectors

    def key(row: int) -> tuple[list[list[tuple[int, int, str, str]]], Labels]:
        labels = vectors.labels[row]
        parts: list[list[tuple[int, int, str, str]]] = []
        for name in names:
            parts.append(_natural(labels.value(name)))
            budget.charge(2 * len(parts[-1]))
        return parts, labels

    return vectors.rows(sorted(range(len(vectors.labels)), key=key, reverse=descending))


def _natural(text: str) -> list[tuple[int, int, str, str]]:
    """Split a text into runs. Runs of digits compare as numbers of any length and sort before other runs."""
    parts: list[tuple[int, int, str, str]] = []
    for run in _RUN.findall(f"{text}\0"):
        if run[0] in "0123456789":
            number = run.lstrip("0")
            parts.append((0, len(number), number, run))
        else:
            parts.append((1, 0, run, ""))
    return parts


def _check_name(name: str) -> None:
    if not name:
        raise ExecutionError("the name of the destination label is empty")


_Args: TypeAlias = list[ast.Expr]
_Function: TypeAlias = "Callable[[Evaluation, _Args], Value]"

_OF_A_RANGE: Final[dict[str, Callable[[Windows], Vectors]]] = {
    "avg_over_time": range_functions.avg_over_time,
    "changes": range_functions.changes,
    "count_over_time": range_functions.count_over_time,
    "delta": range_functions.delta,
    "deriv": range_functions.deriv,
    "first_over_time": range_functions.first_over_time,
    "idelta": range_functions.idelta,
    "increase": range_functions.increase,
    "irate": range_functions.irate,
    "last_over_time": range_functions.last_over_time,
    "mad_over_time": range_functions.mad_over_time,
    "max_over_time": range_functions.max_over_time,
    "min_over_time": range_functions.min_over_time,
    "present_over_time": range_functions.present_over_time,
    "rate": range_functions.rate,
    "resets": range_functions.resets,
    "stddev_over_time": range_functions.stddev_over_time,
    "stdvar_over_time": range_functions.stdvar_over_time,
    "sum_over_time": range_functions.sum_over_time,
}


def call(evaluation: Evaluation, name: str, args: _Args) -> Value:
    """Evaluate a function. `name` must be one of `FUNCTIONS`."""
    if name in _OF_A_RANGE:
        return _OF_A_RANGE[name](evaluation.windows(args[0]))
    if name in ELEMENTWISE:
        return _of_each(evaluation.vectors(args[0]), ELEMENTWISE[name])
    if name in CALENDAR:
        vectors = evaluation.vectors(args[0]) if args else _as_vector(_time(evaluation, args))
        return _of_each(vectors, CALENDAR[name])
    return _SPECIAL[name](evaluation, args)


def _of_each(vectors: Vectors, function: Callable[[Floats], Floats]) -> Vectors:
    with np.errstate(all="ignore"):
        return vectors.with_values(function(vectors.values))


def _time(evaluation: Evaluation, args: _Args) -> Scalars:
    return Scalars(evaluation.grid.times / 1000.0)


def _pi(evaluation: Evaluation, args: _Args) -> Scalars:
    return Scalars(np.full(evaluation.grid.count, np.pi))


def _vector(evaluation: Evaluation, args: _Args) -> Vectors:
    return _as_vector(evaluation.scalars(args[0]))


def _as_vector(scalars: Scalars) -> Vectors:
    return Vectors([NO_LABELS], scalars.values[None], np.ones((1, len(scalars.values)), np.bool_))


def _scalar(evaluation: Evaluation, args: _Args) -> Scalars:
    """Return the value of the only series at a step, or NaN if there is none or more than one."""
    vectors = evaluation.vectors(args[0])
    alone = vectors.present.sum(axis=0) == 1
    values = np.where(vectors.present & alone, vectors.values, 0.0).sum(axis=0)
    return Scalars(np.where(alone, values, np.nan))


def _timestamp(evaluation: Evaluation, args: _Args) -> Vectors:
    """Return the time of the sample for a selector, or of the step for any other expression."""
    selector = unwrapped(args[0])
    if isinstance(selector, ast.VectorSelector):
        vectors, stamps = evaluation.latest(selector)
        return vectors.with_values(stamps / 1000.0)
    vectors = evaluation.vectors(args[0])
    return vectors.with_values(np.broadcast_to(evaluation.grid.times / 1000.0, vectors.values.shape))


def _absent(evaluation: Evaluation, args: _Args) -> Vectors:
    selector = unwrapped(args[0])
    labels = NO_LABELS
    if isinstance(selector, ast.VectorSelector):
        labels = absent_labels(matchers_of(selector))
    return absence(evaluation.vectors(args[0]).present, labels)


def _absent_over_time(evaluation: Evaluation, args: _Args) -> Vectors:
    selector = unwrapped(args[0])
    labels = NO_LABELS
    if isinstance(selector, ast.MatrixSelector):
        labels = absent_labels(matchers_of(selector.vector_selector))
    return absence(evaluation.windows(args[0]).counts > 0, labels)


def _round(evaluation: Evaluation, args: _Args) -> Vectors:
    nearest = evaluation.scalars(args[1]).values if len(args) > 1 else np.ones(evaluation.grid.count)
    return round_to(evaluation.vectors(args[0]), nearest)


def _clamp(evaluation: Evaluation, args: _Args) -> Vectors:
    low, high = evaluation.scalars(args[1]).values, evaluation.scalars(args[2]).values
    return clamp(evaluation.vectors(args[0]), low, high)


def _clamp_min(evaluation: Evaluation, args: _Args) -> Vectors:
    return clamp_min(evaluation.vectors(args[0]), evaluation.scalars(args[1]).values)


def _clamp_max(evaluation: Evaluation, args: _Args) -> Vectors:
    return clamp_max(evaluation.vectors(args[0]), evaluation.scalars(args[1]).values)


def _quantile_over_time(evaluation: Evaluation, args: _Args) -> Vectors:
    return range_functions.quantile_over_time(evaluation.windows(args[1]), evaluation.scalars(args[0]).values)


def _predict_linear(evaluation: Evaluation, args: _Args) -> Vectors:
    windows = evaluation.windows(args[0])
    since_end_s = (
        evaluation.grid.times - windows.ends
    ) / 1000.0  # `offset` and `@` move windows, not the step
    return range_functions.predict_linear(windows, evaluation.scalars(args[1]).values + since_end_s)


def _histogram_quantile(evaluation: Evaluation, args: _Args) -> Vectors:
    quantile, buckets = evaluation.scalars(args[0]).values, evaluation.vectors(args[1])
    return histogram_quantile(quantile, buckets, evaluation.budget)


def _label_replace(evaluation: Evaluation, args: _Args) -> Vectors:
    into, template, source, expression = map(literal_text, args[1:])
    vectors = evaluation.vectors(args[0])
    return label_replace(vectors, into, template, source, expression, evaluation.budget)


def _label_join(evaluation: Evaluation, args: _Args) -> Vectors:
    into, separator, *sources = map(literal_text, args[1:])
    vectors = evaluation.vectors(args[0])
    return label_join(vectors, into, separator, sources, evaluation.budget)


def _sort(evaluation: Evaluation, args: _Args) -> Vectors:
    return sort_by_value(evaluation.vectors(args[0]), descending=False)


def _sort_desc(evaluation: Evaluation, args: _Args) -> Vectors:
    return sort_by_value(evaluation.vectors(args[0]), descending=True)


def _sort_by_label(evaluation: Evaluation, args: _Args) -> Vectors:
    names = [literal_text(arg) for arg in args[1:]]
    vectors = evaluation.vectors(args[0])
    return sort_by_label(vectors, names, evaluation.budget, descending=False)


def _sort_by_label_desc(evaluation: Evaluation, args: _Args) -> Vectors:
    names = [literal_text(arg) for arg in args[1:]]
    vectors = evaluation.vectors(args[0])
    return sort_by_label(vectors, names, evaluation.budget, descending=True)


_SPECIAL: Final[dict[str, _Function]] = {
    "absent": _absent,
    "absent_over_time": _absent_over_time,
    "clamp": _clamp,
    "clamp_max": _clamp_max,
    "clamp_min": _clamp_min,
    "histogram_quantile": _histogram_quantile,
    "label_join": _label_join,
    "label_replace": _label_replace,
    "pi": _pi,
    "predict_linear": _predict_linear,
    "quantile_over_time": _quantile_over_time,
    "round": _round,
    "scalar": _scalar,
    "sort": _sort,
    "sort_by_label": _sort_by_label,
    "sort_by_label_desc": _sort_by_label_desc,
    "sort_desc": _sort_desc,
    "time": _time,
    "timestamp": _timestamp,
    "vector": _vector,
}

FUNCTIONS: Final = frozenset(_OF_A_RANGE) | ELEMENTWISE.keys() | CALENDAR.keys() | _SPECIAL.keys()
"""Names of all supported functions."""
