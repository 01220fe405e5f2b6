"""What an expression is worth at every step: a vector of series, one number, or a text.

Presence is a mask of its own, because NaN is a value like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from penstock.timeseries.arrays import Floats, Integers, Mask
from penstock.timeseries.model import Labels
from penstock.timeseries.promql.errors import ExecutionError

__all__ = ["SAME_LABELS", "Scalars", "Text", "Value", "Vectors", "group_by", "merged", "rows_by_group"]

SAME_LABELS = "vector cannot contain metrics with the same labelset"


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """An instant vector per step: one row per series, one column per step, and where there is a value."""

    labels: Sequence[Labels]
    values: Floats
    present: Mask

    @classmethod
    def empty(cls, steps: int) -> Vectors:
        return cls((), np.empty((0, steps)), np.empty((0, steps), np.bool_))

    def rows(self, chosen: Integers | Sequence[int]) -> Vectors:
        """Those rows, in that order."""
        index = np.asarray(chosen, np.intp)
        return Vectors([self.labels[row] for row in index.tolist()], self.values[index], self.present[index])

    def where(self, present: Mask) -> Vectors:
        """Only what is present in the mask too; rows that are left with nothing go."""
        return Vectors(self.labels, self.values, self.present & present).compact()

    def with_values(self, values: Floats) -> Vectors:
        """Other values in the same places, without the metric's name: they are no longer that metric."""
        return merged([labels.without_name() for labels in self.labels], values, self.present)

    def compact(self) -> Vectors:
        """Without the rows that have no value at any step."""
        some = self.present.any(axis=1)
        return self if bool(some.all()) else self.rows(np.flatnonzero(some))


@dataclass(frozen=True, slots=True, eq=False)
class Scalars:
    """One number per step."""

    values: Floats


@dataclass(frozen=True, slots=True)
class Text:
    """A text, the same at every step."""

    value: str


Value: TypeAlias = Vectors | Scalars | Text


def group_by(keys: Sequence[Labels]) -> tuple[list[Labels], Integers]:
    """The distinct keys in the order in which they first appear, and the group of each."""
    numbers: dict[Labels, int] = {}
    groups = np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.intp, len(keys))
    return list(numbers), groups


def rows_by_group(groups: Integers, count: int) -> list[Integers]:
    """The rows of each of `count` groups, each in order."""
    if not count:
        return []
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.cumsum(np.bincount(groups, minlength=count))[:-1])


def merged(labels: Sequence[Labels], values: Floats, present: Mask, conflict: str = SAME_LABELS) -> Vectors:
    """Rows of one label set as one row. It makes no more cells than it is given, which are charged already.

    Raises `ExecutionError` with `conflict` if two of them have a value at one step.
    """
    distinct, groups = group_by(labels)
    if len(distinct) == len(labels):
        return Vectors(labels, values, present)
    steps = values.shape[1]
    counts = np.zeros((len(distinct), steps), np.int64)
    np.add.at(counts, groups, present)
    if bool((counts > 1).any()):
        raise ExecutionError(conflict)
    joined = np.zeros((len(distinct), steps))
    row, step = np.nonzero(present)
    joined[groups[row], step] = values[row, step]
    return Vectors(distinct, joined, counts > 0)
