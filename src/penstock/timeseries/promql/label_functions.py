"""Functions of labels and of order: what a series is called, whether it is there, where it stands."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.errors import InvalidInput, LimitExceeded
from penstock.timeseries.arrays import Mask
from penstock.timeseries.matcher import Matcher, MatchOp
from penstock.timeseries.model import LABEL_BYTES_MAX, METRIC_NAME, SERIES_BYTES_MAX, Labels
from penstock.timeseries.patterns import Pattern, pieces
from penstock.timeseries.promql.budget import Budget
from penstock.timeseries.promql.errors import ExecutionError
from penstock.timeseries.promql.vectors import Vectors, merged

__all__ = [
    "absence",
    "absent_labels",
    "checked_labels",
    "label_join",
    "label_replace",
    "sort_by_label",
    "sort_by_value",
]

_SHORTEN: Final = "Use a shorter template or separator, or fewer sources"
_RUN: Final = re.compile(r"[0-9]+|[^0-9]+")


def label_replace(
    vectors: Vectors, into: str, template: str, source: str, expression: str, budget: Budget
) -> Vectors:
    """Where the whole of label `source` matches, label `into` becomes the filled template.

    Raises `ExecutionError` if the expression or the label's name is none, if two series become one, and
    before a label is made that is longer than a stored one may be. Raises as `Budget.charge` does.
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
                f"label_replace() makes label {into[:80]!r} too long: {error}. {_SHORTEN}"
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
    """Label `into` becomes the values of the others, one after the other. Raises as `label_replace` does."""
    _check_name(into)

    def joined(own: Labels) -> Labels:
        values = [own.value(source) for source in sources]
        size = sum(map(len, values)) + len(separator) * max(0, len(values) - 1)
        if size > LABEL_BYTES_MAX:
            raise ExecutionError(
                f"label_join() makes label {into[:80]!r} too long: {size:,} characters; "
                f"at most {LABEL_BYTES_MAX:,} are allowed. {_SHORTEN}"
            )
        return checked_labels(own.replace(into, separator.join(values)), "label_join()")

    labels = list(budget.charge_labels(map(joined, vectors.labels)))
    return merged(labels, vectors.values, vectors.present)


def checked_labels(labels: Labels, maker: str) -> Labels:
    """The labels, if they could be stored. Raises `ExecutionError` that names the limit otherwise."""
    total = 0
    for name, value in labels:
        size = _size(name) + _size(value)
        if size > LABEL_BYTES_MAX:
            raise ExecutionError(
                f"{maker} makes label {name[:80]!r} too long: {size:,} bytes with its name; "
                f"at most {LABEL_BYTES_MAX:,} are allowed. {_SHORTEN}"
            )
        total += size
    if total > SERIES_BYTES_MAX:
        raise ExecutionError(
            f"{maker} makes the labels of a series too long: {total:,} bytes; "
            f"at most {SERIES_BYTES_MAX:,} are allowed. {_SHORTEN}"
        )
    return labels


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def absence(present: Mask, labels: Labels) -> Vectors:
    """1, under `labels`, at the steps at which no row is there."""
    absent: Mask = np.logical_not(np.any(present, axis=0))
    return Vectors([labels], np.ones((1, len(absent))), absent[None]).compact()


def absent_labels(matchers: Sequence[Matcher]) -> Labels:
    """What is certain of a series that is missed: labels asked for once, by equality."""
    names = Counter(matcher.name for matcher in matchers)
    return Labels.of(
        (matcher.name, matcher.value)
        for matcher in matchers
        if matcher.op is MatchOp.EQUAL and names[matcher.name] == 1 and matcher.name != METRIC_NAME
    )


def sort_by_value(vectors: Vectors, *, descending: bool) -> Vectors:
    """Rows by value, NaN last. Over several steps rows have no order, so there nothing changes."""
    if vectors.values.shape[1] != 1:
        return vectors
    values = vectors.values[:, 0]
    return vectors.rows(np.lexsort((-values if descending else values, np.isnan(values))))


def sort_by_label(vectors: Vectors, names: Sequence[str], budget: Budget, *, descending: bool) -> Vectors:
    """Rows by the values of labels, digits within them as numbers, then by all labels.

    Every part of a key is charged: raises as `Budget.charge` does.
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
    """Runs of digits as numbers of any length, which sort before the runs of other characters."""
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
