"""Operators between vectors: how series are matched, and which labels the results have.

Two series match if they have equal values of the matching labels: those that `on` names, or all except the
metric's name and those that `ignoring` names. At each step, at least one side must have a single series per
match, except for set operators.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.timeseries.model import METRIC_NAME, Floats, Integers, Labels, Mask
from penstock.timeseries.promql.limits import Budget, ExecutionError
from penstock.timeseries.promql.vectors import Scalars, Vectors, checked_labels, group_by, merged

COMPARISONS: Final[dict[str, Callable[[Floats, Floats], Mask]]] = {
    "==": np.equal,
    "!=": np.not_equal,
    ">": np.greater,
    "<": np.less,
    ">=": np.greater_equal,
    "<=": np.less_equal,
}
SET_OPERATORS: Final = frozenset({"and", "or", "unless"})

_ARITHMETIC: Final[dict[str, Callable[[Floats, Floats], Floats]]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "%": np.fmod,  # the sign is the dividend's
    "^": np.power,
    "atan2": np.arctan2,
}


def arithmetic(op: str, left: Floats, right: Floats) -> Floats:
    """Compute as IEEE 754 does: division by zero gives an infinity or NaN."""
    with np.errstate(all="ignore"):
        return _ARITHMETIC[op](left, right)


def compare(op: str, left: Floats, right: Floats) -> Mask:
    """Return where the comparison holds. With NaN, only `!=` holds."""
    with np.errstate(invalid="ignore"):
        return COMPARISONS[op](left, right)


_MANY_IMPLICIT = "multiple matches for labels: many-to-one matching must be explicit (group_left/group_right)"
_MANY_GROUPED = "multiple matches for labels: grouping labels must ensure unique matches"


class Cardinality(enum.Enum):
    """Number of series on each side that may match."""

    ONE_TO_ONE = "one to one"
    MANY_TO_ONE = "group_left"
    ONE_TO_MANY = "group_right"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """The matching modifier of a binary operator."""

    cardinality: Cardinality = Cardinality.ONE_TO_ONE
    on: bool = False
    labels: tuple[str, ...] = ()
    include: tuple[str, ...] = ()

    def signature(self, labels: Labels) -> Labels:
        """Return the matching labels of a series."""
        return labels.keep(self.labels) if self.on else labels.drop((METRIC_NAME, *self.labels))

    def result(self, many: Labels, one: Labels, *, keep_name: bool) -> Labels:
        """Return the labels of a pair's result: those of the "many" side and the included ones of the
        other."""
        labels = many if keep_name else many.without_name()
        if self.cardinality is Cardinality.ONE_TO_ONE:
            labels = labels.keep(self.labels) if self.on else labels.drop(self.labels)
        for name in self.include:
            labels = labels.replace(name, one.value(name))
        return labels


def between_scalars(op: str, left: Scalars, right: Scalars) -> Scalars:
    """Apply arithmetic, or a comparison that yields 1 or 0."""
    if op in COMPARISONS:
        return Scalars(compare(op, left.values, right.values).astype(np.float64))
    return Scalars(arithmetic(op, left.values, right.values))


def with_scalars(op: str, left: Vectors | Scalars, right: Vectors | Scalars, *, as_bool: bool) -> Vectors:
    """Combine a vector with one number per step.

    A comparison filters the vector, or yields 1 or 0 with `bool`.
    """
    vectors = left if isinstance(left, Vectors) else right
    assert isinstance(vectors, Vectors)
    if op not in COMPARISONS:
        return vectors.with_values(arithmetic(op, left.values, right.values))
    holds = compare(op, left.values, right.values)
    return vectors.with_values(holds.astype(np.float64)) if as_bool else vectors.where(holds)


def between_vectors(
    op: str, left: Vectors, right: Vectors, matching: Matching, budget: Budget, *, as_bool: bool
) -> Vectors:
    """Combine every matching pair. Raises `ExecutionError` if too many series match."""
    swapped = matching.cardinality is Cardinality.ONE_TO_MANY
    many, one = (right, left) if swapped else (left, right)
    many_keys, one_keys = _signatures(many, one, matching, budget)
    _refuse_duplicates(many, one, one_keys, "left" if swapped else "right", budget)
    pairs = _pairs(many_keys, one_keys)
    steps = many.values.shape[1]
    budget.charge(len(pairs[0]) * steps)
    many_values, one_values = many.values[pairs[0]], one.values[pairs[1]]
    sides = (one_values, many_values) if swapped else (many_values, one_values)
    values, keep = _combined(op, *sides, as_bool=as_bool)
    present = many.present[pairs[0]] & one.present[pairs[1]] & keep
    if matching.cardinality is Cardinality.ONE_TO_ONE:
        _refuse_many(many_keys[pairs[0]], present, budget)
    keep_name = op in COMPARISONS and not as_bool
    made = (
        matching.result(many.labels[at_many], one.labels[at_one], keep_name=keep_name)
        for at_many, at_one in zip(pairs[0].tolist(), pairs[1].tolist(), strict=True)
    )
    if matching.include:
        made = (checked_labels(labels, "group_left() or group_right()") for labels in made)
        labels = list(budget.charge_labels(made))
    else:
        labels = list(budget.watch(made))
    return merged(labels, values, present, _MANY_GROUPED).compact()


def set_operation(op: str, left: Vectors, right: Vectors, matching: Matching, budget: Budget) -> Vectors:
    """Apply `and`, `or` or `unless`. They select series by their matching labels and leave values
    unchanged."""
    left_keys, right_keys = _signatures(left, right, matching, budget)
    budget.charge((len(left.labels) + len(right.labels)) * left.values.shape[1])
    if op == "or":
        absent = ~_any_of(left, left_keys, right_keys)
        added = right.where(absent)
        return merged(
            [*left.labels, *added.labels],
            np.concatenate((left.values, added.values)),
            np.concatenate((left.present, added.present)),
        )
    found = _any_of(right, right_keys, left_keys)
    return left.where(found if op == "and" else ~found)


def _signatures(
    left: Vectors, right: Vectors, matching: Matching, budget: Budget
) -> tuple[Integers, Integers]:
    """Return a number for each row of both sides. Rows with equal matching labels have equal numbers."""
    keys = [matching.signature(labels) for labels in budget.watch((*left.labels, *right.labels))]
    numbers = group_by(keys)[1]
    return numbers[: len(left.labels)], numbers[len(left.labels) :]


def _any_of(vectors: Vectors, keys: Integers, wanted: Integers) -> Mask:
    """Return, for each wanted key and step, whether any row with that key has a value."""
    size = int(max(keys.max(initial=-1), wanted.max(initial=-1))) + 1
    found = np.zeros((size, vectors.present.shape[1]), np.bool_)
    row, step = np.nonzero(vectors.present)
    found[keys[row], step] = True
    return found[wanted]


def _pairs(many_keys: Integers, one_keys: Integers) -> tuple[Integers, Integers]:
    """Return every pair of rows with equal keys, in the order of the "many" side."""
    order = np.argsort(one_keys, kind="stable")
    ordered = one_keys[order]
    low = np.searchsorted(ordered, many_keys, side="left")
    counts = np.searchsorted(ordered, many_keys, side="right") - low
    many = np.repeat(np.arange(len(many_keys)), counts)
    nth = np.arange(len(many)) - np.repeat(np.cumsum(counts) - counts, counts)
    return many, order[np.repeat(low, counts) + nth]


def _combined(op: str, left: Floats, right: Floats, *, as_bool: bool) -> tuple[Floats, Mask]:
    if op not in COMPARISONS:
        return arithmetic(op, left, right), np.ones(left.shape, np.bool_)
    holds = compare(op, left, right)
    if as_bool:
        return holds.astype(np.float64), np.ones(left.shape, np.bool_)
    return left, holds


def _refuse_duplicates(many: Vectors, one: Vectors, keys: Integers, side: str, budget: Budget) -> None:
    """Raise `ExecutionError` for duplicates on the "one" side, except at steps where the other side is
    empty."""
    clash = _clash(keys, one.present & many.present.any(axis=0), budget)
    if clash is None:
        return
    row_labels: Sequence[Labels] = [one.labels[row] for row in clash]
    raise ExecutionError(
        f"found duplicate series for the match group on the {side} hand-side of the operation: "
        f"[{row_labels[0]}, {row_labels[1]}]; many-to-many matching not allowed: "
        "matching labels must be unique on one side"
    )


def _refuse_many(keys: Integers, present: Mask, budget: Budget) -> None:
    if _clash(keys, present, budget) is not None:
        raise ExecutionError(_MANY_IMPLICIT)


def _clash(keys: Integers, present: Mask, budget: Budget) -> tuple[int, int] | None:
    """Return two rows with the same key that have a value at the same step, if there are any."""
    distinct, numbers = np.unique(keys, return_inverse=True)
    if len(distinct) == len(keys):
        return None
    budget.charge(len(distinct) * present.shape[1])
    counts = np.zeros((len(distinct), present.shape[1]), np.int64)
    np.add.at(counts, numbers, present)
    found = np.argwhere(counts > 1)
    if not len(found):
        return None
    key, step = found[0]
    first, second = np.flatnonzero((numbers == key) & present[:, step])[:2].tolist()
    return first, second
