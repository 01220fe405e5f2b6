"""Column conversions for both directions: values, attributes, ids, times, and comparing rows.

Each column is converted in one step, usually without a copy.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.otlp.json_form import json_of
from penstock.otlp.schema import (
    ANY_VALUE,
    ARRAY,
    ATTRIBUTES,
    BOOL,
    BYTES,
    DOUBLE,
    INT,
    MAP,
    OTHER,
    STR,
    TIME,
)
from penstock.protowire import varint


class RewriteNeeded(Exception):
    """The request does not fit columns until protobuf has parsed it and serialized it again."""


def duration_of(start: pa.TimestampArray, end: pa.TimestampArray) -> pa.Int64Array:
    """Return the nanoseconds from `start` to `end`, or null if either is null."""
    return pc.subtract(end.cast(pa.int64()), start.cast(pa.int64()))


def text_of(values: pa.StructArray) -> pa.StringArray:
    """Return every value as text: strings unchanged, numbers in digits, bytes in base64, others as JSON.

    The text is null if the value is missing or empty.
    """
    text = values.field("str")
    for name in ("int", "double", "bool"):
        leaf = values.field(name)
        if leaf.null_count < len(leaf):
            text = pc.coalesce(text, leaf.cast(pa.string()))
    for name, write in (("bytes", _base64), ("ser", json_of)):
        leaf = values.field(name)
        if leaf.null_count < len(leaf):
            cells = [None if cell is None else write(cell) for cell in leaf.to_pylist()]
            text = pc.coalesce(text, pa.array(cells, pa.string()))
    return text


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_KINDS: Final = (
    ("string_value", STR),
    ("bool_value", BOOL),
    ("int_value", INT),
    ("double_value", DOUBLE),
    ("array_value", ARRAY),
    ("kvlist_value", MAP),
    ("bytes_value", BYTES),
    ("string_value_strindex", OTHER),
)


def any_values(values: pa.StructArray) -> pa.StructArray:
    """Convert values of any kind."""
    kinds = np.zeros(len(values), np.int8)
    for name, kind in _KINDS:
        leaf = values.field(name)
        if leaf.null_count == 0:
            kinds[:] = kind
        elif _has(leaf):
            kinds[np.asarray(leaf.is_valid())] = kind
    leaves = [
        pa.array(kinds),
        values.field("string_value"),
        values.field("int_value"),
        values.field("double_value"),
        values.field("bool_value"),
        values.field("bytes_value"),
        _serialized(values),
    ]
    mask = values.is_null() if values.null_count else None
    return pa.StructArray.from_arrays(leaves, fields=list(ANY_VALUE), mask=mask)


def _has(leaf: pa.Array) -> bool:
    return bool(leaf.null_count < len(leaf))


def _serialized(values: pa.StructArray) -> pa.BinaryArray:
    """Return the serialized value of each array, map and string reference.

    They are parsed and serialized one by one, which makes their bytes canonical. There are few of them.
    """
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

    cells: list[bytes | None] | None = None
    for name, tag in (("array_value", b"\x2a"), ("kvlist_value", b"\x32")):
        leaf = values.field(name)
        if not _has(leaf):
            continue
        cells = cells or [None] * len(values)
        for place in np.flatnonzero(np.asarray(leaf.is_valid())).tolist():
            inner: bytes = leaf[place].as_py()
            try:
                value = AnyValue.FromString(tag + varint(len(inner)) + inner)
            except DecodeError as error:
                raise RewriteNeeded(str(error)) from error
            cells[place] = value.SerializeToString()
    references = values.field("string_value_strindex")
    if _has(references):
        cells = cells or [None] * len(values)
        for place in np.flatnonzero(np.asarray(references.is_valid())).tolist():
            index: int = references[place].as_py()
            cells[place] = AnyValue(string_value_strindex=index).SerializeToString()
    return pa.nulls(len(values), pa.binary()) if cells is None else pa.array(cells, pa.binary())


def attributes(pairs: pa.ListArray, missing: pa.BooleanArray | None = None) -> pa.MapArray:
    """Convert lists of keys and values to maps, with null where `missing` is true."""
    start, offsets = offsets_of(pairs)
    entries = pairs.values.slice(start, int(offsets[-1]))
    return pa.MapArray.from_arrays(
        pa.array(offsets),
        entries.field("key"),
        any_values(entries.field("value")),
        type=ATTRIBUTES,
        mask=missing,
    )


def offsets_of(lists: pa.ListArray) -> tuple[int, npt.NDArray[np.int32]]:
    """Return the start of the values of `lists`, and the offsets of the lists relative to it."""
    offsets = np.asarray(lists.offsets, np.int32)
    start = int(offsets[0])
    return start, offsets - np.int32(start) if start else offsets


def parents(lists: pa.ListArray) -> npt.NDArray[np.int64]:
    """Return the row index of every value of `lists`."""
    _, offsets = offsets_of(lists)
    return np.repeat(np.arange(len(lists), dtype=np.int64), np.diff(offsets))


def list_of(lists: pa.ListArray, kind: pa.ListType, fields: dict[str, pa.Array]) -> pa.ListArray:
    """Return lists of structs with the given fields and the lengths of `lists`."""
    _, offsets = offsets_of(lists)
    inner = list(kind.value_type)
    structs = pa.StructArray.from_arrays([fields[field.name] for field in inner], fields=inner)
    return pa.ListArray.from_arrays(pa.array(offsets), structs, type=kind)


def times(nanoseconds: pa.UInt64Array) -> pa.TimestampArray:
    """Convert nanoseconds since 1970 to times, and 0 to null."""
    unsigned = np.asarray(nanoseconds)
    unknown = unsigned == 0
    if not unknown.any():
        return nanoseconds.view(TIME)
    return pa.array(unsigned.view(np.int64), pa.int64(), mask=unknown).view(TIME)


def ids(column: pa.BinaryArray, kind: pa.FixedSizeBinaryType) -> pa.FixedSizeBinaryArray:
    """Convert ids to `kind`, and empty ids to null. Raise `RewriteNeeded` for an id of a wrong length."""
    width: int = kind.byte_width
    lengths = np.asarray(pc.binary_length(column))
    present = lengths != 0
    if not np.all(lengths[present] == width):
        raise RewriteNeeded("an id has a wrong length")
    _, offsets, data = column.buffers()
    first = np.frombuffer(offsets, np.int32, 1, column.offset * 4)[0] if len(column) else 0
    if present.all():
        return pa.FixedSizeBinaryArray.from_buffers(
            kind, len(column), [None, _slice(data, int(first), width * len(column))]
        )
    cells = np.zeros((len(column), width), np.uint8)
    if present.any():
        count = int(present.sum())
        cells[present] = np.frombuffer(data, np.uint8, count * width, int(first)).reshape(count, width)
    valid = pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(column), [valid, pa.py_buffer(cells)])


def _slice(data: pa.Buffer | None, start: int, length: int) -> pa.Buffer:
    return pa.py_buffer(b"") if data is None else data.slice(start, length)


Flags = npt.NDArray[np.bool_]


def changes(columns: Sequence[pa.Array]) -> Flags:
    """Return for every row whether any column differs from the previous row. The first row always does."""
    rows = len(columns[0])
    found = np.zeros(rows, np.bool_)
    if rows:
        found[0] = True
        for column in columns:
            found[1:] |= ~same(column.slice(1), column.slice(0, rows - 1))
    return found


def same(left: pa.Array, right: pa.Array) -> Flags:
    """Compare two arrays of one type row by row. Null equals null, and NaN equals itself."""
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
        equal_children = same(one.take(pa.array(left_places)), other.take(pa.array(right_places)))
        equal[row_of[~equal_children]] = False
    return equal


def _flags(column: pa.BooleanArray) -> Flags:
    found: Flags = np.asarray(column, np.bool_)
    return found
