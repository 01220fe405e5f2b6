"""Flat columns back into the nested ones that the native encoder takes: what `nested` does, taken back."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.otlp.errors import Unflattenable
from penstock.otlp.nested import offsets_of
from penstock.otlp.schema import ARRAY, BOOL, BYTES, DOUBLE, INT, MAP, OTHER, STR
from penstock.otlp.wire import field_content

__all__ = [
    "any_of",
    "grouped",
    "list_column",
    "nanoseconds",
    "pairs_of",
    "refuse_negative_zero",
    "struct_column",
]

_LEAVES: Final = (
    ("str", "string_value", STR),
    ("int", "int_value", INT),
    ("double", "double_value", DOUBLE),
    ("bool", "bool_value", BOOL),
    ("bytes", "bytes_value", BYTES),
)


def struct_column(
    kind: pa.StructType, fields: dict[str, pa.Array], length: int, missing: pa.BooleanArray | None = None
) -> pa.StructArray:
    """Structs of `kind`; fields that are not given are zero, or null where they may be."""
    arrays = []
    for field in kind:
        column = fields.get(field.name)
        if column is None:
            column = pa.nulls(length, field.type)
        if column.type != field.type:
            column = column.cast(field.type)
        if not field.nullable and column.null_count:
            column = _filled(column)
        arrays.append(column)
    return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=missing)


def _filled(column: pa.Array) -> pa.Array:
    """Nulls as what the protocol leaves out: zero, or nothing."""
    kind = column.type
    if pa.types.is_list(kind):
        _, offsets = offsets_of(column)
        return pa.ListArray.from_arrays(pa.array(offsets), _within(column), type=kind)
    if pa.types.is_string(kind):
        return column.fill_null("")
    return column.fill_null(b"" if pa.types.is_binary(kind) else False if pa.types.is_boolean(kind) else 0)


def _within(lists: pa.ListArray) -> pa.Array:
    start, offsets = offsets_of(lists)
    if lists.null_count and len(lists.flatten()) != int(offsets[-1]):
        raise Unflattenable("a list that is null holds values")
    return lists.values.slice(start, int(offsets[-1]))


def list_column(kind: pa.ListType, offsets: npt.NDArray[np.integer], values: pa.Array) -> pa.ListArray:
    """Lists of `kind` from the offsets of their ends."""
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind)


def grouped(starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """The offsets of lists that begin at `starts`."""
    return np.append(starts, length)


def nanoseconds(column: pa.TimestampArray) -> pa.UInt64Array:
    """Times as the protocol has them: unsigned, 0 for an unknown one."""
    return column.cast(pa.int64()).fill_null(0).view(pa.uint64())


def pairs_of(kind: pa.ListType, column: pa.MapArray) -> pa.ListArray:
    """Attributes as lists of keys and values."""
    start, offsets = offsets_of(column)
    length = int(offsets[-1])
    if column.null_count:
        lengths = np.diff(offsets)
        if lengths[np.asarray(column.is_null())].any():
            raise Unflattenable("attributes that are null hold some")
    entry = kind.value_type
    values = any_of(entry.field("value").type, column.items.slice(start, length))
    entries = struct_column(entry, {"key": column.keys.slice(start, length), "value": values}, length)
    return list_column(kind, offsets, entries)


def any_of(kind: pa.StructType, column: pa.StructArray) -> pa.StructArray:
    """Values of any kind. Raises `Unflattenable` where their cells do not agree with their `type`."""
    kinds = np.asarray(column.field("type").fill_null(0), np.int8)
    if column.null_count:
        kinds = np.where(np.asarray(column.is_valid()), kinds, np.int8(0))
    fields = {}
    for ours, theirs, number in _LEAVES:
        leaf = column.field(ours)
        wanted = kinds == number
        if leaf.null_count == len(leaf):
            agrees = not wanted.any()
        else:
            agrees = bool((np.asarray(leaf.is_valid()) == wanted).all())
            fields[theirs] = leaf
        if not agrees:
            raise Unflattenable(f"some values have a type that is not that of their cell {ours}")
    fields |= _opaque(column, kinds)
    return struct_column(kind, fields, len(column), column.is_null() if column.null_count else None)


def _opaque(column: pa.StructArray, kinds: npt.NDArray[np.int8]) -> dict[str, pa.Array]:
    """Arrays and maps without the tag and the length in front of them. There are few."""
    if (kinds >= OTHER).any() or (kinds < 0).any():
        raise Unflattenable("a value of a kind that has no column")
    fields: dict[str, pa.Array] = {}
    serialized = column.field("ser")
    for name, number in (("array_value", ARRAY), ("kvlist_value", MAP)):
        places = np.flatnonzero(kinds == number)
        if len(places):
            cells: list[bytes | None] = [None] * len(column)
            for place in places.tolist():
                cells[place] = field_content(serialized[place].as_py(), number)
            fields[name] = pa.array(cells, pa.binary())
    return fields


def refuse_negative_zero(column: pa.DoubleArray) -> None:
    """The native encoder leaves -0.0 out where 0.0 is the default. Raises `Unflattenable` if there is one."""
    values = np.asarray(column.fill_null(1.0))
    if (np.signbit(values) & (values == 0)).any():
        raise Unflattenable("a number is -0.0")
