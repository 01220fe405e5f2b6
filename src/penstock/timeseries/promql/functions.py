"""Every function by its name: what it does with its arguments at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import promql_parser as ast

from penstock.timeseries.arrays import Floats
from penstock.timeseries.model import NO_LABELS
from penstock.timeseries.promql import elementwise, label_functions, over_time, rates
from penstock.timeseries.promql.histograms import histogram_quantile
from penstock.timeseries.promql.tree import literal_text, matchers_of, unwrapped
from penstock.timeseries.promql.vectors import Scalars, Value, Vectors
from penstock.timeseries.promql.windows import Windows

if TYPE_CHECKING:
    from penstock.timeseries.promql.evaluation import Evaluation

__all__ = ["FUNCTIONS", "call"]

_Args: TypeAlias = list[ast.Expr]
_Function: TypeAlias = "Callable[[Evaluation, _Args], Value]"

_OF_A_RANGE: Final[dict[str, Callable[[Windows], Vectors]]] = {
    "avg_over_time": over_time.avg_over_time,
    "changes": rates.changes,
    "count_over_time": over_time.count_over_time,
    "delta": rates.delta,
    "deriv": over_time.deriv,
    "first_over_time": over_time.first_over_time,
    "idelta": rates.idelta,
    "increase": rates.increase,
    "irate": rates.irate,
    "last_over_time": over_time.last_over_time,
    "mad_over_time": over_time.mad_over_time,
    "max_over_time": over_time.max_over_time,
    "min_over_time": over_time.min_over_time,
    "present_over_time": over_time.present_over_time,
    "rate": rates.rate,
    "resets": rates.resets,
    "stddev_over_time": over_time.stddev_over_time,
    "stdvar_over_time": over_time.stdvar_over_time,
    "sum_over_time": over_time.sum_over_time,
}


def call(evaluation: Evaluation, name: str, args: _Args) -> Value:
    """The function's value. The name has been checked to be one of `FUNCTIONS`."""
    if name in _OF_A_RANGE:
        return _OF_A_RANGE[name](evaluation.windows(args[0]))
    if name in elementwise.ELEMENTWISE:
        return _of_each(evaluation.vectors(args[0]), elementwise.ELEMENTWISE[name])
    if name in elementwise.CALENDAR:
        vectors = evaluation.vectors(args[0]) if args else _as_vector(_time(evaluation, args))
        return _of_each(vectors, elementwise.CALENDAR[name])
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
    """The value of the only series at a step, NaN where there is none or more than one."""
    vectors = evaluation.vectors(args[0])
    alone = vectors.present.sum(axis=0) == 1
    values = np.where(vectors.present & alone, vectors.values, 0.0).sum(axis=0)
    return Scalars(np.where(alone, values, np.nan))


def _timestamp(evaluation: Evaluation, args: _Args) -> Vectors:
    """Of a selector the time of the sample itself; of anything else the time of the step."""
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
        labels = label_functions.absent_labels(matchers_of(selector))
    return label_functions.absence(evaluation.vectors(args[0]).present, labels)


def _absent_over_time(evaluation: Evaluation, args: _Args) -> Vectors:
    selector = unwrapped(args[0])
    labels = NO_LABELS
    if isinstance(selector, ast.MatrixSelector):
        labels = label_functions.absent_labels(matchers_of(selector.vector_selector))
    return label_functions.absence(evaluation.windows(args[0]).counts > 0, labels)


def _round(evaluation: Evaluation, args: _Args) -> Vectors:
    nearest = evaluation.scalars(args[1]).values if len(args) > 1 else np.ones(evaluation.grid.count)
    return elementwise.round_to(evaluation.vectors(args[0]), nearest)


def _clamp(evaluation: Evaluation, args: _Args) -> Vectors:
    low, high = evaluation.scalars(args[1]).values, evaluation.scalars(args[2]).values
    return elementwise.clamp(evaluation.vectors(args[0]), low, high)


def _clamp_min(evaluation: Evaluation, args: _Args) -> Vectors:
    return elementwise.clamp_min(evaluation.vectors(args[0]), evaluation.scalars(args[1]).values)


def _clamp_max(evaluation: Evaluation, args: _Args) -> Vectors:
    return elementwise.clamp_max(evaluation.vectors(args[0]), evaluation.scalars(args[1]).values)


def _quantile_over_time(evaluation: Evaluation, args: _Args) -> Vectors:
    return over_time.quantile_over_time(evaluation.windows(args[1]), evaluation.scalars(args[0]).values)


def _predict_linear(evaluation: Evaluation, args: _Args) -> Vectors:
    windows = evaluation.windows(args[0])
    since_end_s = (evaluation.grid.times - windows.ends) / 1000.0  # offset and @ move windows, not the step
    return over_time.predict_linear(windows, evaluation.scalars(args[1]).values + since_end_s)


def _histogram_quantile(evaluation: Evaluation, args: _Args) -> Vectors:
    quantile, buckets = evaluation.scalars(args[0]).values, evaluation.vectors(args[1])
    return histogram_quantile(quantile, buckets, evaluation.budget)


def _label_replace(evaluation: Evaluation, args: _Args) -> Vectors:
    into, template, source, expression = map(literal_text, args[1:])
    vectors = evaluation.vectors(args[0])
    return label_functions.label_replace(vectors, into, template, source, expression, evaluation.budget)


def _label_join(evaluation: Evaluation, args: _Args) -> Vectors:
    into, separator, *sources = map(literal_text, args[1:])
    vectors = evaluation.vectors(args[0])
    return label_functions.label_join(vectors, into, separator, sources, evaluation.budget)


def _sort(evaluation: Evaluation, args: _Args) -> Vectors:
    return label_functions.sort_by_value(evaluation.vectors(args[0]), descending=False)


def _sort_desc(evaluation: Evaluation, args: _Args) -> Vectors:
    return label_functions.sort_by_value(evaluation.vectors(args[0]), descending=True)


def _sort_by_label(evaluation: Evaluation, args: _Args) -> Vectors:
    names = [literal_text(arg) for arg in args[1:]]
    vectors = evaluation.vectors(args[0])
    return label_functions.sort_by_label(vectors, names, evaluation.budget, descending=False)


def _sort_by_label_desc(evaluation: Evaluation, args: _Args) -> Vectors:
    names = [literal_text(arg) for arg in args[1:]]
    vectors = evaluation.vectors(args[0])
    return label_functions.sort_by_label(vectors, names, evaluation.budget, descending=True)


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

FUNCTIONS: Final = (
    frozenset(_OF_A_RANGE) | elementwise.ELEMENTWISE.keys() | elementwise.CALENDAR.keys() | _SPECIAL.keys()
)
"""The names of all functions that can be called."""
