"""Where a table changes from row to row: rows of one resource, scope or metric stand behind each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Flags", "changes", "same"]

Flags = npt.NDArray[np.bool_]


def changes(columns: Sequence[pa.Array]) -> Flags:
    """For every row whether one of `columns` differs from the row before; the first row always does."""
    rows = len(columns[0])
    found = np.zeros(rows, np.bool_)
    if rows:
        found[0] = True
        for column in columns:
            found[1:] |= ~same(column.slice(1), column.slice(0, rows - 1))
    return found


def same(left: pa.Array, right: pa.Array) -> Flags:
    """Row by row, whether two arrays of one type hold the same; null is like null, and NaN like itself."""
    kind = left.type
    if pa.types.is_dictionary(kind):
        return same(left.dictionary_decode(), right.dictionary_decode())
    valid, other_valid = _flags(left.is_valid()), _flags(right.is_valid())
    if pa.types.is_struct(kind):
        equal = np.ones(len(left), np.bool_)
        for one, other in zip(left.flatten(), right.flatten(), strict=True):
            equal &= same(one, other)
    elif pa.types.is_list(kind) or pa.types.is_map(kind):
        equal = _same_lists(left, right)
    else:
        equal = _same_leaves(left, right)
    found: Flags = (valid == other_valid) & (equal | ~valid)
    return found


def _same_leaves(left: pa.Array, right: pa.Array) -> Flags:
    if pa.types.is_floating(left.type):
        left, right = left.view(pa.int64()), right.view(pa.int64())
    return _flags(pc.fill_null(pc.equal(left, right), False))


def _same_lists(left: pa.Array, right: pa.Array) -> Flags:
    left_offsets, right_offsets = np.asarray(left.offsets, np.int64), np.asarray(right.offsets, np.int64)
    lengths = np.diff(left_offsets)
    equal: Flags = lengths == np.diff(right_offsets)
    lengths = np.where(equal, lengths, 0)
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    left_places = np.repeat(left_offsets[:-1], lengths) + within
    right_places = np.repeat(right_offsets[:-1], lengths) + within
    children = [(left.values, right.values)]
    if pa.types.is_map(left.type):
        children = [(left.keys, right.keys), (left.items, right.items)]
    row_of = np.repeat(np.arange(len(left)), lengths)
    for one, other in children:
        alike = same(one.take(pa.array(left_places)), other.take(pa.array(right_places)))
        equal[row_of[~alike]] = False
    return equal


def _flags(column: pa.BooleanArray) -> Flags:
    found: Flags = np.asarray(column, np.bool_)
    return found
