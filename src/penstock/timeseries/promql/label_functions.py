"""Functions of labels and of order: what a series is called, whether it is there, where it stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from penstock.errors import InvalidInput
from penstock.timeseries.arrays import Mask
from penstock.timeseries.matcher import Matcher, MatchOp
from penstock.timeseries.model import METRIC_NAME, Labels
from penstock.timeseries.patterns import Pattern
from penstock.timeseries.promql.errors import ExecutionError
from penstock.timeseries.promql.vectors import Vectors, merged

__all__ = ["absence", "absent_labels", "label_join", "label_replace", "sort_by_label", "sort_by_value"]


def label_replace(vectors: Vectors, into: str, template: str, source: str, expression: str) -> Vectors:
    """Where the whole of label `source` matches, label `into` becomes the filled template.

    Raises `ExecutionError` if the expression or the label's name is none, or if two series become one.
    """
    _check_name(into)
    try:
        pattern = Pattern(expression)
    except InvalidInput as error:
        raise ExecutionError(f"invalid regular expression in label_replace(): {error}") from None
    expanded = pattern.expand([labels.value(source) for labels in vectors.labels], template)
    labels = [
        own if value is None else own.replace(into, value)
        for own, value in zip(vectors.labels, expanded, strict=True)
    ]
    return merged(labels, vectors.values, vectors.present)


def label_join(vectors: Vectors, into: str, separator: str, sources: Sequence[str]) -> Vectors:
    """Label `into` becomes the values of the others, one behind the other."""
    _check_name(into)
    labels = [
        own.replace(into, separator.join(own.value(source) for source in sources)) for own in vectors.labels
    ]
    return merged(labels, vectors.values, vectors.present)


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


def sort_by_label(vectors: Vectors, names: Sequence[str], *, descending: bool) -> Vectors:
    """Rows by the values of labels, digits within them as numbers, then by all labels."""
    if vectors.values.shape[1] != 1:
        return vectors

    def key(row: int) -> tuple[list[list[tuple[int, int, str]]], Labels]:
        labels = vectors.labels[row]
        return [_natural(labels.value(name)) for name in names], labels

    return vectors.rows(sorted(range(len(vectors.labels)), key=key, reverse=descending))


def _natural(text: str) -> list[tuple[int, int, str]]:
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for character in f"{text}\0":
        if character.isascii() and character.isdigit():
            digits += character
            continue
        if digits:
            parts.append((0, int(digits), digits))
            digits = ""
        parts.append((1, 0, character))
    return parts


def _check_name(name: str) -> None:
    if not name:
        raise ExecutionError("the name of the destination label is empty")
